#include "group.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace polyscale {
namespace {

constexpr double SLICE_S = 0.1;  // between two looks at whether the others live
constexpr double FAREWELL_S = 2.0;
const char CLOSED_BY_PEER[] = "ProcessGroupShm: connection closed by peer: ";

}  // namespace

const char* kind_name(uint32_t kind) {
    static const char* names[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce",
                                  "gather",     "scatter",        "all_to_all", "barrier",   "shared"};
    return kind < sizeof names / sizeof names[0] ? names[kind] : "an unknown collective";
}

const char* operation_name(uint32_t operation) {
    static const char* names[] = {"sum", "product", "min", "max", "band", "bor", "bxor", "avg", "premul_sum"};
    return operation < sizeof names / sizeof names[0] ? names[operation] : "";
}

std::string describe(const Signature& signature) {
    std::string text = kind_name(signature.kind);
    if (signature.operation < NO_OPERATION) text += std::string(" (") + operation_name(signature.operation) + ")";
    if (signature.kind == SHARE) return text + " of " + std::to_string(signature.count) + " bytes";
    if (signature.kind != BARRIER) {
        if (signature.uneven == 0) text += " of " + std::to_string(signature.count) + " elements";
        text += std::string(" of ") + name_of(signature.dtype);
        if (signature.uneven != 0) text += " in pieces";
    }
    return text + (signature.root >= 0 ? " with root " + std::to_string(signature.root) : "");
}

Group::Group(uint32_t rank, uint32_t world, uint64_t nonce)
    : rank(rank), world(world), layout(world), owner_(getpid()), bases_(world), peers_(world), patience_(0) {
    segment_ = make_segment(layout.size());
    Header& mine = *reinterpret_cast<Header*>(segment_->base);  // all zero so far
    mine.nonce = nonce;
    mine.magic = MAGIC;
    bases_[rank] = segment_->base;
}

Group::~Group() {
    close();
    release();
}

void Group::release() {
    if (forked()) {
        (void)segment_.release();  // the parent's numbers may be others' by now
        return;
    }
    free_staging();
    for (uint32_t other = 0; other < world; ++other) {
        if (other != rank && bases_[other] != nullptr) munmap(bases_[other], layout.size());
        bases_[other] = nullptr;
    }
    segment_.reset();
    for (std::shared_ptr<Peer>& peer : peers_) peer.reset();
}

void Group::connect(uint32_t other, pid_t pid, uint64_t started, int fd, uint64_t nonce, const std::string& socket) {
    peers_[other] = peer_of(pid, started, socket);
    if (bases_[other] != nullptr) munmap(bases_[other], layout.size());
    bases_[other] = nullptr;
    char* base = peers_[other]->map(fd, layout.size());
    const Header& header = *reinterpret_cast<Header*>(base);
    if (header.magic != MAGIC || header.nonce != nonce) {
        munmap(base, layout.size());
        throw SystemFailure("the memory of rank " + std::to_string(other) + " is not what it should be", EINVAL);
    }
    bases_[other] = base;
}

bool Group::can_read(uint32_t other, uint64_t address, uint64_t nonce) {
    uint64_t found[2] = {};
    return peers_[other]->read(address, found, sizeof found) == 0 && found[0] == MAGIC && found[1] == nonce;
}

void Group::start(const Settings& settings) {
    settings_ = settings;
    patience_ = Patience(settings.spin_s);
    half_ = std::max<uint64_t>(settings.staging / 2, 64 * world) / 64 * 64;
    if (world > 1 && !settings.read_memory) staging_ = heap().allocate(2 * half_);
}

bool Group::forked() const { return getpid() != owner_; }

void Group::require_usable() const {
    if (forked()) throw Lost("ProcessGroupShm: this process was forked from the one that made the group");
    if (closing()) throw Lost("ProcessGroupShm: the group was destroyed");
    const Header& mine = header(rank);
    if (mine.state.load(std::memory_order_acquire) == BROKEN) throw Lost(mine.why);
}

std::string Group::who(uint32_t other) const {
    return "rank " + std::to_string(other) + (peers_[other] ? " (pid " + std::to_string(peers_[other]->pid) + ")" : "");
}

std::string Group::closed_by(uint32_t other, const std::string& doing) const {
    return CLOSED_BY_PEER + who(other) + " is gone, its process has ended, during " + doing;
}

void Group::break_off(const std::string& why) {
    Header& mine = header(rank);
    if (mine.state.load() != OPEN) return;
    snprintf(mine.why, sizeof mine.why, "%s", why.c_str());
    mine.state.store(BROKEN, std::memory_order_release);
}

void Group::lose(const std::string& why) {
    break_off(why);
    throw Lost(why);
}

void Group::wait(uint32_t other, What what, uint32_t round, const Call& call, double deadline) {
    Word& word = what == POSTED_WORD ? header(other).posted : header(other).done;
    const auto met = [&] { return reached(word.value.load(std::memory_order_acquire), round); };
    if (patience_.spin(met)) return;
    waits_.store(uint64_t(round) << 2 | uint64_t(what) << 1 | 1);
    const struct Waits {
        std::atomic<uint64_t>& word;
        ~Waits() { word.store(0); }
    } waits{waits_};
    double look = now() + SLICE_S;
    for (;;) {
        const uint32_t seen = word.value.load(std::memory_order_seq_cst);
        if (reached(seen, round)) return;
        sleep_on(word, seen, SLICE_S);
        if (now() < look) continue;
        look_around(what, round, call, deadline);
        look = now() + SLICE_S;
    }
}

// A rank that gave up comes to no further collective.
void Group::require_whole(const Call& call) {
    for (uint32_t each = 0; each < world; ++each)
        if (each != rank && header(each).state.load(std::memory_order_acquire) == BROKEN)
            lose_with(each, std::string(kind_name(call.signature.kind)) + " number " + std::to_string(call.number));
}

void Group::lose_with(uint32_t other, const std::string& doing) {
    const Header& found = header(other);
    const std::string why(found.why, strnlen(found.why, sizeof found.why)), prefix = "ProcessGroupShm: ";
    lose(CLOSED_BY_PEER + who(other) + " gave up, during " + doing + ": " +
         (why.compare(0, prefix.size(), prefix) == 0 ? why.substr(prefix.size()) : why));
}

// What has kept us waiting: a rank that is gone, one that gave up, one that left, or one that is late.
void Group::look_around(What what, uint32_t round, const Call& call, double deadline) {
    const std::string doing = std::string(kind_name(call.signature.kind)) + " number " + std::to_string(call.number);
    if (closing()) throw Lost("ProcessGroupShm: the group was destroyed during " + doing);
    if (header(rank).state.load() == BROKEN) throw Lost(header(rank).why);  // by another thread
    for (uint32_t each = 0; each < world; ++each) {
        const Header& found = header(each);
        const Word& word = what == POSTED_WORD ? found.posted : found.done;
        if (each == rank || reached(word.value.load(std::memory_order_acquire), round)) continue;
        const uint32_t state = found.state.load(std::memory_order_acquire);
        const bool gone = peers_[each]->gone();
        if (reached(word.value.load(std::memory_order_acquire), round)) continue;  // it came just now
        if (gone) lose(closed_by(each, doing));
        if (state == BROKEN) lose_with(each, doing);
        if (state == CLOSED) lose(CLOSED_BY_PEER + who(each) + " has destroyed the group, during " + doing);
    }
    if (now() > deadline) lose(late(what, round, call));
    if (while_waiting) try {
            while_waiting();
        } catch (...) {
            break_off("ProcessGroupShm: " + doing + " was interrupted");
            throw Interrupted{std::current_exception()};
        }
}

std::string Group::late(What what, uint32_t round, const Call& call) const {
    char seconds[32];
    snprintf(seconds, sizeof seconds, "%g", call.timeout);
    return "ProcessGroupShm: " + describe(call.signature) + ", number " + std::to_string(call.number) +
           " of the group, timed out after " + seconds + " s: " + missing(what, round);
}

std::string Group::missing(What what, uint32_t round) const {
    std::string names;
    for (uint32_t each = 0; each < world; ++each) {
        const Word& word = what == POSTED_WORD ? header(each).posted : header(each).done;
        if (each != rank && !reached(word.value.load(), round)) names += (names.empty() ? "" : ", ") + who(each);
    }
    if (names.empty()) return "it is under way";
    return "waiting for " + names + (what == POSTED_WORD ? " to call it" : " to finish it");
}

std::string Group::waiting_for() const {
    const uint64_t waits = waits_.load();
    if ((waits & 1) == 0) return "it is under way, or waits for those before it";
    return missing(What(waits >> 1 & 1), uint32_t(waits >> 2));
}

void Group::close() {
    if (closing_.exchange(true) || forked()) return;
    uint32_t open = OPEN;
    header(rank).state.compare_exchange_strong(open, CLOSED);
}

// Another rank may still read data on its way: the block is not used again before that.
void Group::free_staging() {
    if (staging_ == nullptr) return;
    const double until = now() + FAREWELL_S;
    bool read = false;
    while (!read && header(rank).state.load() != BROKEN) {
        read = true;
        for (uint32_t each = 0; each < world; ++each)
            if (each != rank && !peers_[each]->gone())
                for (uint32_t last : staged_) read = read && reached(header(each).done.value.load(), last);
        if (read || now() > until) break;
        usleep(1000);
    }
    if (read) heap().free(staging_);
    staging_ = nullptr;
}

}  // namespace polyscale
