#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <set>

#ifndef MFD_CLOEXEC
#define MFD_CLOEXEC 1U
#define MFD_ALLOW_SEALING 2U
#endif
#ifndef F_ADD_SEALS
#define F_ADD_SEALS 1033
#define F_SEAL_SHRINK 2
#define F_SEAL_GROW 4
#endif
#ifndef FALLOC_FL_PUNCH_HOLE
#define FALLOC_FL_KEEP_SIZE 1
#define FALLOC_FL_PUNCH_HOLE 2
#endif

namespace polyscale {
namespace {

constexpr uint64_t PAGE = 4096, MIB = uint64_t(1) << 20;
constexpr uint64_t SMALLEST_SEGMENT = 4 * MIB;
constexpr uint64_t LEFT_TO_OTHERS = 64 * MIB;  // of the memory of the host

uint64_t rounded(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Known {
    std::mutex lock;
    std::set<int> fds;
    std::atomic<uint32_t> last{0};
};

Known& known() {
    static Known* found = new Known;  // never destroyed: threads may be at work while the process ends
    return *found;
}

// MemAvailable of the host in bytes; the largest number where it is not known.
uint64_t available_memory() {
    FILE* file = fopen("/proc/meminfo", "re");
    if (file == nullptr) return UINT64_MAX;
    char line[128];
    unsigned long long kib = 0;
    bool found = false;
    while (!found && fgets(line, sizeof line, file) != nullptr) found = sscanf(line, "MemAvailable: %llu", &kib) == 1;
    fclose(file);
    return found ? uint64_t(kib) * 1024 : UINT64_MAX;
}

bool read_number(const char* path, uint64_t* value) {
    FILE* file = fopen(path, "re");
    if (file == nullptr) return false;
    unsigned long long number = 0;
    const bool found = fscanf(file, "%llu", &number) == 1;
    fclose(file);
    *value = number;
    return found;
}

// What the limit of a container (cgroup v2) leaves; what the page cache holds of it can be taken back.
uint64_t container_memory() {
    uint64_t limit, used;
    if (!read_number("/sys/fs/cgroup/memory.max", &limit)) return UINT64_MAX;
    if (!read_number("/sys/fs/cgroup/memory.current", &used)) return UINT64_MAX;
    uint64_t cache = 0;
    FILE* file = fopen("/sys/fs/cgroup/memory.stat", "re");
    char line[128];
    unsigned long long value;
    while (file != nullptr && fgets(line, sizeof line, file) != nullptr)
        if (sscanf(line, "inactive_file %llu", &value) == 1 || sscanf(line, "active_file %llu", &value) == 1)
            cache += value;
    if (file != nullptr) fclose(file);
    used -= std::min(used, cache);
    return limit > used ? limit - used : 0;
}

// The kernel ends a process that touches pages for which there is no memory: ask before.
void check_memory(uint64_t bytes) {
    if (bytes + LEFT_TO_OTHERS > std::min(available_memory(), container_memory()))
        throw SystemFailure("reserving " + std::to_string(bytes >> 20) + " MiB of shared memory", ENOMEM);
}

void reserve(int fd, uint64_t from, uint64_t bytes) {
    int code;
    do code = fallocate(fd, 0, off_t(from), off_t(bytes)) == 0 ? 0 : errno;
    while (code == EINTR);
    if (code != 0) throw SystemFailure("fallocate of " + std::to_string(bytes) + " bytes of shared memory", code);
}

}  // namespace

SystemFailure::SystemFailure(const std::string& what, int code)
    : std::runtime_error(what + ": " + strerror(code)), code(code) {}

Segment::~Segment() {
    if (base != nullptr) munmap(base, size);
    if (fd < 0) return;
    {
        std::lock_guard<std::mutex> hold(known().lock);
        known().fds.erase(fd);
    }
    close(fd);
}

std::unique_ptr<Segment> make_segment(uint64_t bytes) {
    std::unique_ptr<Segment> made(new Segment);
    bytes = rounded(bytes, PAGE);
    if (bytes >= SMALLEST_SEGMENT) check_memory(bytes);
    made->fd = int(syscall(SYS_memfd_create, "polyscale", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (made->fd < 0) throw SystemFailure("memfd_create", errno);
    reserve(made->fd, 0, bytes);
    fcntl(made->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, made->fd, 0);
    if (at == MAP_FAILED) throw SystemFailure("mmap of " + std::to_string(bytes) + " bytes", errno);
    made->base = static_cast<char*>(at);
    made->size = bytes;
    made->number = ++known().last;
    std::lock_guard<std::mutex> hold(known().lock);
    known().fds.insert(made->fd);
    return made;
}

bool is_segment(int fd) {
    std::lock_guard<std::mutex> hold(known().lock);
    return known().fds.count(fd) > 0;
}

Heap::Heap() : owner(getpid()) {}

char* Heap::allocate(uint64_t bytes) {
    bytes = rounded(std::max<uint64_t>(bytes, 1), PAGE);
    std::lock_guard<std::mutex> hold(lock_);
    char* block = take(bytes, false);
    if (block == nullptr) block = take(bytes, true);
    if (block == nullptr) {
        grow(bytes);
        block = take(bytes, false);
    }
    blocks_[block] = bytes;
    used_ += bytes;
    return block;
}

// The smallest gap that is large enough; its pages are there already, unless hollow ones will do.
char* Heap::take(uint64_t bytes, bool hollow) {
    Area* best = nullptr;
    std::map<uint64_t, Gap>::iterator found;
    for (auto& entry : areas_)
        for (auto gap = entry.second.gaps.begin(); gap != entry.second.gaps.end(); ++gap)
            if (gap->second.hollow == hollow && gap->second.size >= bytes &&
                (best == nullptr || gap->second.size < found->second.size)) {
                best = &entry.second;
                found = gap;
            }
    if (best == nullptr) return nullptr;
    if (hollow) {
        check_memory(bytes);
        reserve(best->segment->fd, found->first, bytes);
    }
    return cut(*best, found, bytes);
}

char* Heap::cut(Area& area, std::map<uint64_t, Gap>::iterator gap, uint64_t bytes) {
    const uint64_t begin = gap->first;
    const Gap rest = {gap->second.size - bytes, gap->second.hollow};
    if (!gap->second.hollow) spare_ -= bytes;
    area.gaps.erase(gap);
    if (rest.size > 0) area.gaps[begin + bytes] = rest;
    return area.segment->base + begin;
}

// A segment of its own for a large block; an eighth of what there is for small ones, so that descriptors stay few.
void Heap::grow(uint64_t bytes) {
    const uint64_t wish = std::max({bytes, SMALLEST_SEGMENT, std::min(reserved_ / 8, 256 * MIB)});
    std::unique_ptr<Segment> segment;
    try {
        segment = make_segment(rounded(wish, MIB));
    } catch (const SystemFailure&) {
        if (wish == bytes) throw;
        segment = make_segment(bytes);
    }
    Area& area = areas_[segment->base];
    reserved_ += segment->size;
    spare_ += segment->size;
    area.gaps[0] = {segment->size, false};
    area.segment = std::move(segment);
}

void Heap::free(char* block) {
    std::lock_guard<std::mutex> hold(lock_);
    const auto known_block = blocks_.find(block);
    if (known_block == blocks_.end()) return;  // of the process that this one was forked from
    const uint64_t bytes = known_block->second;
    blocks_.erase(known_block);
    used_ -= bytes;
    spare_ += bytes;
    Area& area = *area_of(block);
    auto gap = area.gaps.emplace(uint64_t(block - area.segment->base), Gap{bytes, false}).first;
    const auto after = std::next(gap);
    if (after != area.gaps.end() && gap->first + gap->second.size == after->first &&
        after->second.hollow == gap->second.hollow) {
        gap->second.size += after->second.size;
        area.gaps.erase(after);
    }
    if (gap != area.gaps.begin()) {
        const auto before = std::prev(gap);
        if (before->first + before->second.size == gap->first && before->second.hollow == gap->second.hollow) {
            before->second.size += gap->second.size;
            area.gaps.erase(gap);
            gap = before;
        }
    }
    if (spare_ > keep_) hollow_out(area, gap);
}

// Give the pages of a gap back; the mappings of all processes stay as they are.
void Heap::hollow_out(Area& area, std::map<uint64_t, Gap>::iterator gap) {
    if (fallocate(area.segment->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(gap->first),
                  off_t(gap->second.size)) != 0)
        return;
    spare_ -= gap->second.size;
    gap->second.hollow = true;
    const auto after = std::next(gap);
    if (after != area.gaps.end() && after->second.hollow && gap->first + gap->second.size == after->first) {
        gap->second.size += after->second.size;
        area.gaps.erase(after);
    }
    if (gap == area.gaps.begin()) return;
    const auto before = std::prev(gap);
    if (before->second.hollow && before->first + before->second.size == gap->first) {
        before->second.size += gap->second.size;
        area.gaps.erase(gap);
    }
}

Heap::Area* Heap::area_of(const char* at) {
    const auto found = areas_.lower_bound(const_cast<char*>(at));
    if (found == areas_.end() || uint64_t(at - found->first) >= found->second.segment->size) return nullptr;
    return &found->second;
}

bool Heap::find(const char* at, uint64_t bytes, Place* place) {
    std::lock_guard<std::mutex> hold(lock_);
    Area* area = area_of(at);
    if (area == nullptr || uint64_t(at - area->segment->base) + bytes > area->segment->size) return false;
    const Segment& segment = *area->segment;
    *place = {PLACE_SEGMENT, segment.number, segment.fd, 0, segment.size, uint64_t(at - segment.base)};
    return true;
}

std::vector<uint64_t> Heap::usage() {
    std::lock_guard<std::mutex> hold(lock_);
    return {areas_.size(), reserved_, used_, spare_};
}

void Heap::keep(uint64_t bytes) {
    std::lock_guard<std::mutex> hold(lock_);
    keep_ = bytes;
}

Heap& heap() {
    static std::atomic<Heap*> mine{nullptr};
    Heap* found = mine.load(std::memory_order_acquire);
    if (found != nullptr && found->owner == getpid()) return *found;
    Heap* made = new Heap;  // what a parent had stays mapped, and is left alone
    if (!mine.compare_exchange_strong(found, made)) delete made;
    return *mine.load();
}

}  // namespace polyscale
