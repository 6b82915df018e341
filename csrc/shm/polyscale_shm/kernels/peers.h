// Processes of other ranks: whether they live, and their memory.
#pragma once

#include <stdint.h>
#include <sys/types.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "memory.h"

namespace polyscale {

// One other process. Its segments are mapped at first sight, and unmapped with the last group that it is in.
class Peer {
   public:
    // `socket`: of its `serve`; "": its descriptors are opened in /proc.
    Peer(pid_t pid, const std::string& socket);
    ~Peer();
    Peer(const Peer&) = delete;
    Peer& operator=(const Peer&) = delete;

    const pid_t pid;
    // Whether the process has ended; a zombie has.
    bool gone() const;
    // The address here of a place in one of its segments. Throws SystemFailure.
    char* at(const Place& place);
    // A mapping of one segment that the caller unmaps.
    char* map(int fd, uint64_t size) const;
    // Copies from its ordinary memory; returns 0 or errno.
    int read(uint64_t from, void* to, uint64_t bytes) const;

   private:
    int descriptor(int fd) const;

    struct Mapping {
        char* base;
        uint64_t size;
    };
    const std::string socket_;
    int pidfd_;
    std::mutex lock_;
    std::unordered_map<uint32_t, Mapping> mappings_;
};

// The one object of a process, shared by all groups; `nonce` tells it from a later process of the same number.
std::shared_ptr<Peer> peer_of(pid_t pid, uint64_t nonce, const std::string& socket);

// Hands descriptors of segments to processes of the same user, from a thread, over an abstract socket; its name.
std::string serve_descriptors();

}  // namespace polyscale
