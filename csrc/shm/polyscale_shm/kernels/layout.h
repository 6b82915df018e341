// What lies in the segment of one rank of a group: words, records of collectives, slots of messages.
//
// Each rank writes into its own segment, and every rank of the group maps all of them. The exceptions are the counts of
// sleepers, and the state of a message's slot, which sender and receiver change in turn.
#pragma once

#include <stdint.h>

#include "memory.h"
#include "waiting.h"

namespace polyscale {

constexpr uint64_t MAGIC = 0x706f6c797368'0002;  // the layout's version is in its last digits
constexpr uint32_t RING = 4;                      // records that a rank may be ahead of the slowest
constexpr uint64_t INLINE_BYTES = 16384;          // data that travels within a record
constexpr uint32_t SLOTS = 32;                    // messages from one rank to another that wait
constexpr uint64_t SLOT_BYTES = 512;
constexpr int LONGEST_REASON = 400;

enum State : uint32_t { OPEN = 0, CLOSED = 1, BROKEN = 2 };

struct Header {
    uint64_t magic;
    uint64_t nonce;
    std::atomic<uint32_t> state;
    char why[LONGEST_REASON];  // of BROKEN
    Word posted;               // the last round whose data, or record, are there
    Word done;                 // the last round in which this rank has read all that it reads
    Word bell;                 // rung for messages
};

// What all ranks must call alike.
struct Signature {
    uint32_t kind;
    uint32_t dtype;
    uint32_t operation;
    int32_t root;
    uint64_t count;   // elements
    uint64_t uneven;  // whether the tables below count
};

// Followed by `world` places, the bytes for each rank and the bytes from each rank (uint64), and INLINE_BYTES.
struct Record {
    Signature signature;
    double factor;
    uint64_t largest;  // bytes of its largest piece, where they come in chunks
    uint32_t places;   // 0; 1: pieces follow one another from place 0; world: one for each rank
    uint32_t reserved;
};

enum SlotState : uint32_t { FREE = 0, POSTED = 1, BUSY = 2, TAKEN = 3, REFUSED = 4, FAILED = 5 };

// One message, or a fragment of one: what it is, and where the receiver finds its bytes.
struct Slot {
    std::atomic<uint32_t> state;
    int32_t tag;
    uint32_t dtype;
    uint32_t expected_dtype;  // REFUSED: what the receiver wants
    uint64_t order;           // of the message among those from one rank to another
    uint64_t total, offset, bytes;
    uint64_t expected;  // REFUSED: bytes; FAILED: the receiver's errno
    Place place;
};

constexpr uint64_t SLOT_INLINE = SLOT_BYTES - sizeof(Slot);
static_assert(sizeof(Slot) < SLOT_BYTES, "a slot has room for a small message");

struct Layout {
    uint32_t world;
    explicit Layout(uint32_t world) : world(world) {}

    uint64_t record_bytes() const {
        return (sizeof(Record) + world * (sizeof(Place) + 16) + 63) / 64 * 64 + INLINE_BYTES;
    }
    uint64_t records() const { return (sizeof(Header) + 63) / 64 * 64; }
    uint64_t slots() const { return records() + RING * record_bytes(); }
    uint64_t size() const { return slots() + uint64_t(world) * SLOTS * SLOT_BYTES; }

    Record* record(char* base, uint32_t round) const {
        return reinterpret_cast<Record*>(base + records() + round % RING * record_bytes());
    }
    Place* places(Record* record) const { return reinterpret_cast<Place*>(record + 1); }
    uint64_t* to_each(Record* record) const { return reinterpret_cast<uint64_t*>(places(record) + world); }
    uint64_t* from_each(Record* record) const { return to_each(record) + world; }
    char* inline_data(Record* record) const {
        return reinterpret_cast<char*>(record) + record_bytes() - INLINE_BYTES;
    }
    // Of messages to rank `to`, in the segment of their sender.
    Slot* slot(char* base, uint32_t to, uint32_t index) const {
        return reinterpret_cast<Slot*>(base + slots() + (uint64_t(to) * SLOTS + index) * SLOT_BYTES);
    }
    static char* slot_data(Slot* slot) { return reinterpret_cast<char*>(slot + 1); }
};

}  // namespace polyscale
