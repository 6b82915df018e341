// Memory of this process that other processes can map: memfd segments, and blocks in them.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace polyscale {

// What the system refuses: the call and its errno, in words.
struct SystemFailure : std::runtime_error {
    SystemFailure(const std::string& what, int code);
    int code;
};

// Where bytes lie, as one process tells another. PLACE_ADDRESS: in its ordinary memory, at the address `at`.
enum PlaceKind : uint32_t { PLACE_NONE = 0, PLACE_INLINE = 1, PLACE_SEGMENT = 2, PLACE_ADDRESS = 3, PLACE_STAGED = 4 };

struct Place {
    uint32_t kind;
    uint32_t segment;  // number of the segment in its process
    int32_t fd;        // of the segment, in its process
    uint32_t reserved;
    uint64_t size;  // of the segment
    uint64_t at;    // from the start of the segment, or an address
};

// One memfd, mapped. Its pages are reserved when it is made, and it can never shrink: touching it raises no signal.
struct Segment {
    uint32_t number = 0;
    int fd = -1;
    char* base = nullptr;
    uint64_t size = 0;

    Segment() = default;
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;
    ~Segment();
};

// Throws SystemFailure where memory is forbidden or too small.
std::unique_ptr<Segment> make_segment(uint64_t bytes);
// Whether `fd` is that of a segment of this process.
bool is_segment(int fd);

// Blocks in segments of this process. A freed block is used again, its pages already there.
class Heap {
   public:
    const int owner;  // process

    Heap();
    // Throws SystemFailure. Blocks begin at pages.
    char* allocate(uint64_t bytes);
    void free(char* block);
    // Fills `place` when [at, at + bytes) lies in a block of this heap.
    bool find(const char* at, uint64_t bytes, Place* place);
    // (segments, bytes reserved, bytes in use)
    std::vector<uint64_t> usage();
    // Free bytes that are kept for later use; more go back to the system.
    void keep(uint64_t bytes);

   private:
    struct Gap {
        uint64_t size;
        bool hollow;  // its pages were given back, at least in part
    };
    struct Area {
        std::unique_ptr<Segment> segment;
        std::map<uint64_t, Gap> gaps;
    };

    char* take(uint64_t bytes, bool hollow);
    char* cut(Area& area, std::map<uint64_t, Gap>::iterator gap, uint64_t bytes);
    void grow(uint64_t bytes);
    void hollow_out(Area& area, std::map<uint64_t, Gap>::iterator gap);
    Area* area_of(const char* at);

    std::mutex lock_;
    std::map<char*, Area, std::greater<char*>> areas_;  // by base, descending
    std::unordered_map<char*, uint64_t> blocks_;
    uint64_t reserved_ = 0, used_ = 0, spare_ = 0, keep_ = uint64_t(256) << 20;
};

// That of this process; a forked child gets one of its own.
Heap& heap();

}  // namespace polyscale
