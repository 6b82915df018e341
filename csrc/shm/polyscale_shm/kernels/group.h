// One process group: its members' segments, rounds, and what a collective is.
#pragma once

#include <stdint.h>

#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "layout.h"
#include "peers.h"
#include "sums.h"

namespace polyscale {

enum Kind : uint32_t {
    ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, REDUCE, GATHER, SCATTER, ALL_TO_ALL, BARRIER, SHARE
};

struct Piece {
    char* at;
    uint64_t bytes;
};

// One collective of one rank. `ins`: one piece for all ranks, or one for each; `outs`: as the kind has it.
struct Call {
    Signature signature{};
    double factor = 1.0;
    double timeout = 0.0;  // seconds
    std::vector<Piece> ins, outs;
    uint64_t number = 0;  // among the collectives of the group
    Place shared{};       // SHARE: the segment of rank 0
    char* mapped = nullptr;  // SHARE: here, on other ranks
};

// A difference between what ranks call; the group goes on.
struct Mismatch : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// Memory that ranks share was refused on one of them; the group goes on.
struct NotShared : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// What `while_waiting` threw in the middle of a collective (Ctrl-C); the group is of no more use.
struct Interrupted {
    std::exception_ptr by;
};
// Another rank is gone, or late; the group is of no more use.
struct Lost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Settings {
    uint64_t staging = uint64_t(2) << 20;  // bytes for data of ordinary memory, both halves together
    double spin_s = 50e-6;
    bool read_memory = false;  // peers' ordinary memory may be read
};

class Group {
   public:
    // Makes the segment of this rank. Throws SystemFailure.
    Group(uint32_t rank, uint32_t world, uint64_t nonce);
    ~Group();
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    const uint32_t rank, world;
    const Layout layout;

    int fd() const { return segment_->fd; }
    uint64_t address() const { return reinterpret_cast<uint64_t>(segment_->base); }
    // Maps the segment of another rank; `nonce` is in its header. Throws SystemFailure.
    void connect(uint32_t rank, pid_t pid, uint64_t started, int fd, uint64_t nonce, const std::string& socket);
    // Whether the ordinary memory of a connected rank can be read.
    bool can_read(uint32_t rank, uint64_t address, uint64_t nonce);
    // All ranks are connected: collectives may come. Throws SystemFailure.
    void start(const Settings& settings);

    // Carries out one collective; calls of one group come one after another. Throws Mismatch, NotShared, Lost, or
    // Interrupted.
    void run(Call& call);
    // Called now and then while this process waits; it may throw.
    std::function<void()> while_waiting;

    // Leave: wakes what waits here and there. Safe in a forked child, where it does nothing.
    void close();
    // Give all memory back, once no thread uses it: a collective under way still reads and writes the staging block.
    void release();
    bool closing() const { return closing_.load(); }
    bool forked() const;
    // Refuses a group that is closed, broken, or of the parent process.
    void require_usable() const;
    // The rest of the class is for the parts of the transport.

    Header& header(uint32_t rank) const { return *reinterpret_cast<Header*>(bases_[rank]); }
    char* base(uint32_t rank) const { return bases_[rank]; }
    Peer& peer(uint32_t rank) const { return *peers_[rank]; }
    std::string who(uint32_t rank) const;
    const Settings& settings() const { return settings_; }
    // Bytes of one half of the staging block; the same on all ranks.
    uint64_t half() const { return half_; }
    // Marks the group as broken, for all ranks.
    void break_off(const std::string& why);
    // The same, and throws Lost.
    [[noreturn]] void lose(const std::string& why);
    // Which ranks the collective under way waits for, in words.
    std::string waiting_for() const;
    std::string closed_by(uint32_t rank, const std::string& doing) const;

   private:
    friend class Collective;

    enum What { POSTED_WORD, DONE_WORD };
    void wait(uint32_t rank, What what, uint32_t round, const Call& call, double deadline);
    void look_around(What what, uint32_t round, const Call& call, double deadline);
    void require_whole(const Call& call);
    void free_staging();
    [[noreturn]] void lose_with(uint32_t rank, const std::string& doing);
    std::string late(What what, uint32_t round, const Call& call) const;
    std::string missing(What what, uint32_t round) const;

    const int owner_;
    std::unique_ptr<Segment> segment_;
    std::vector<char*> bases_;
    std::vector<std::shared_ptr<Peer>> peers_;
    Settings settings_;
    Patience patience_;
    uint32_t round_ = 0;
    std::atomic<bool> closing_{false};
    std::atomic<uint64_t> waits_{0};  // round << 2 | what << 1 | whether it waits
    // Data of ordinary memory on its way: two halves, and the last round that used each.
    char* staging_ = nullptr;
    uint64_t half_ = 0;
    uint32_t staged_[2] = {0, 0};
    std::vector<char> bounce_;
};

const char* kind_name(uint32_t kind);
const char* operation_name(uint32_t operation);
std::string describe(const Signature& signature);

}  // namespace polyscale
