#include "peers.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <map>
#include <thread>
#include <utility>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace polyscale {
namespace {

constexpr int SOCKET_TIMEOUT_S = 10;

struct Descriptor {
    int fd;
    explicit Descriptor(int fd) : fd(fd) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() {
        if (fd >= 0) close(fd);
    }
};

socklen_t abstract_address(const std::string& name, sockaddr_un* address) {
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    memcpy(address->sun_path + 1, name.data(), name.size());  // a leading zero: no file
    return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

bool of_this_user(int connection) {
    ucred who;
    socklen_t length = sizeof who;
    return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &who, &length) == 0 && who.uid == geteuid();
}

void limit_time(int socket) {
    const timeval limit = {SOCKET_TIMEOUT_S, 0};
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

union Control {
    cmsghdr header;
    char space[CMSG_SPACE(sizeof(int))];
};

// One byte, and the descriptor where there is one.
void answer(int connection) {
    limit_time(connection);
    int32_t wanted = -1;
    if (!of_this_user(connection) || recv(connection, &wanted, sizeof wanted, MSG_WAITALL) != sizeof wanted) return;
    char byte = is_segment(wanted) ? 1 : 0;
    iovec data = {&byte, 1};
    Control control;
    memset(&control, 0, sizeof control);
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    if (byte != 0) {
        message.msg_control = control.space;
        message.msg_controllen = sizeof control.space;
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &wanted, sizeof(int));
    }
    (void)!sendmsg(connection, &message, MSG_NOSIGNAL);
}

void serve(int listening) {
    for (;;) {
        const Descriptor connection(accept4(listening, nullptr, nullptr, SOCK_CLOEXEC));
        if (connection.fd >= 0)
            answer(connection.fd);
        else if (errno != EINTR && errno != ECONNABORTED)
            usleep(100000);  // out of descriptors, for a while
    }
}

int received(const std::string& name, int32_t wanted) {
    const Descriptor connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connection.fd < 0) throw SystemFailure("a socket for descriptors", errno);
    limit_time(connection.fd);
    sockaddr_un address;
    const socklen_t length = abstract_address(name, &address);
    if (connect(connection.fd, reinterpret_cast<sockaddr*>(&address), length) != 0)
        throw SystemFailure("connecting to the socket of a rank for its descriptors", errno);
    if (!of_this_user(connection.fd)) throw SystemFailure("the socket of a rank for its descriptors", EPERM);
    if (send(connection.fd, &wanted, sizeof wanted, MSG_NOSIGNAL) != sizeof wanted)
        throw SystemFailure("asking a rank for a descriptor", errno);
    char byte = 0;
    iovec data = {&byte, 1};
    Control control;
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.space;
    message.msg_controllen = sizeof control.space;
    const ssize_t got = recvmsg(connection.fd, &message, MSG_CMSG_CLOEXEC);
    const cmsghdr* header = got == 1 ? CMSG_FIRSTHDR(&message) : nullptr;
    if (header == nullptr || header->cmsg_type != SCM_RIGHTS)
        throw SystemFailure("receiving a descriptor from a rank", got < 0 ? errno : EBADF);
    int fd;
    memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return fd;
}

}  // namespace

Peer::Peer(pid_t pid, const std::string& socket)
    : pid(pid), socket_(socket), pidfd_(int(syscall(SYS_pidfd_open, pid, 0))) {}

Peer::~Peer() {
    for (auto& entry : mappings_) munmap(entry.second.base, entry.second.size);
    if (pidfd_ >= 0) close(pidfd_);
}

bool Peer::gone() const {
    if (pidfd_ >= 0) {
        pollfd look = {pidfd_, POLLIN, 0};
        return poll(&look, 1, 0) == 1;
    }
    if (kill(pid, 0) != 0) return errno == ESRCH;
    char path[64], text[512] = {};
    snprintf(path, sizeof path, "/proc/%d/stat", int(pid));
    FILE* file = fopen(path, "re");
    if (file == nullptr) return false;
    (void)!fread(text, 1, sizeof text - 1, file);
    fclose(file);
    const char* end = strrchr(text, ')');  // the name before it may hold anything
    return end != nullptr && (end[2] == 'Z' || end[2] == 'X');
}

int Peer::descriptor(int fd) const {
    if (!socket_.empty()) return received(socket_, fd);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", int(pid), fd);
    const int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened < 0) throw SystemFailure(std::string("opening ") + path, errno);
    return opened;
}

char* Peer::map(int fd, uint64_t size) const {
    const Descriptor own(descriptor(fd));
    struct stat found;
    if (fstat(own.fd, &found) != 0) throw SystemFailure("fstat of a rank's memory", errno);
    if (uint64_t(found.st_size) < size) throw SystemFailure("a rank's memory is smaller than it says", EINVAL);
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, own.fd, 0);
    if (base == MAP_FAILED) throw SystemFailure("mmap of " + std::to_string(size) + " bytes of a rank", errno);
    return static_cast<char*>(base);
}

char* Peer::at(const Place& place) {
    std::lock_guard<std::mutex> hold(lock_);
    const auto found = mappings_.find(place.segment);
    if (found != mappings_.end()) return found->second.base + place.at;
    char* base = map(place.fd, place.size);
    mappings_[place.segment] = {base, place.size};
    return base + place.at;
}

int Peer::read(uint64_t from, void* to, uint64_t bytes) const {
    char* target = static_cast<char*>(to);
    while (bytes > 0) {
        iovec here = {target, size_t(bytes)}, there = {reinterpret_cast<void*>(from), size_t(bytes)};
        const ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got < 0 ? errno : EFAULT;
        target += got;
        from += uint64_t(got);
        bytes -= uint64_t(got);
    }
    return 0;
}

std::shared_ptr<Peer> peer_of(pid_t pid, uint64_t nonce, const std::string& socket) {
    typedef std::tuple<pid_t, pid_t, uint64_t, std::string> Key;
    static std::mutex* lock = new std::mutex;
    static std::map<Key, std::weak_ptr<Peer>>* peers = new std::map<Key, std::weak_ptr<Peer>>;
    std::lock_guard<std::mutex> hold(*lock);
    for (auto each = peers->begin(); each != peers->end();)
        each = each->second.expired() ? peers->erase(each) : std::next(each);
    std::weak_ptr<Peer>& known = (*peers)[Key(getpid(), pid, nonce, socket)];
    std::shared_ptr<Peer> found = known.lock();
    if (found == nullptr) known = found = std::make_shared<Peer>(pid, socket);
    return found;
}

std::string serve_descriptors() {
    static std::mutex* lock = new std::mutex;
    static std::string* name = new std::string;
    static pid_t owner = 0;
    std::lock_guard<std::mutex> hold(*lock);
    if (owner == getpid()) return *name;
    uint64_t random = 0;
    const Descriptor source(open("/dev/urandom", O_RDONLY | O_CLOEXEC));
    if (source.fd < 0 || read(source.fd, &random, sizeof random) != sizeof random)
        throw SystemFailure("reading /dev/urandom", errno);
    char text[64];
    snprintf(text, sizeof text, "polyscale-%d-%016llx", int(getpid()), static_cast<unsigned long long>(random));
    const int listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listening < 0) throw SystemFailure("a socket for descriptors", errno);
    sockaddr_un address;
    const socklen_t length = abstract_address(text, &address);
    if (bind(listening, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(listening, 128) != 0) {
        const int code = errno;
        close(listening);
        throw SystemFailure("the socket for descriptors", code);
    }
    std::thread(serve, listening).detach();  // for as long as the process lives
    *name = text;
    owner = getpid();
    return *name;
}

}  // namespace polyscale
