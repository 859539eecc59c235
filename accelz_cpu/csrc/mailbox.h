// What the ranks of a group see of each other: one mailbox per rank, in a segment that the rank owns.
//
// Only a mailbox's owner writes to it, except for the bell, which others ring. An entry of the ring of posts is
// written in full before its number; a reader reads the number first and then the rest.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "call.h"

namespace accelz {

constexpr uint64_t RING = 128;                 // collectives of a stream that can be in progress
constexpr uint32_t LENT = 256;                 // blocks that callers can have at once
constexpr uint32_t BLOCKS = STREAMS * RING + LENT;  // one for each of either
constexpr size_t SMALL = 448;                  // bytes of data that a note itself can carry
constexpr uint64_t MAGIC = 0x616363656c7a0003;  // changes with the layout below

// A rank's note of one collective.
struct alignas(64) Post {
    std::atomic<uint64_t> number;  // its place in the stream, from 1; 0: never used
    Call call;
    uint64_t bytes;                // of the owner's data
    uint32_t block;                // where the data are, as an index into blocks
    uint32_t with_own;             // whether the owner's slice is among them, as in a block that its caller has filled
    uint64_t offset;               // bytes before the data in the block
    // Data of up to SMALL bytes. Ranks that have the mailbox mapped can read them even if the owner has just ended,
    // so ranks may leave after a barrier without waiting for anyone.
    alignas(64) char small[SMALL];
};

// A segment that others read data from. generation grows when the segment is replaced.
struct BlockEntry {
    int32_t descriptor;
    uint32_t generation;
    uint64_t capacity;
};

struct Mailbox {
    uint64_t magic;
    int32_t rank, size;
    std::atomic<uint32_t> failed;   // no further collective: `reason` says why
    std::atomic<uint32_t> leaving;  // nothing more will be posted
    char reason[1024];
    alignas(64) std::atomic<uint32_t> bell;  // a futex that changes when another rank has done something
    std::atomic<uint32_t> sleepers;          // the owner's threads that are waiting for the bell
    alignas(64) std::atomic<uint64_t> posted[STREAMS];
    alignas(64) std::atomic<uint64_t> consumed[STREAMS];  // up to which collective this rank needs no data any more
    BlockEntry blocks[BLOCKS];
    Post posts[STREAMS][RING];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "atomics must work between processes");

// Tell the mailbox's owner that something has changed.
void ring(Mailbox &mailbox);

// Sleep until the bell is no longer `seen`, at most `seconds`. May return early.
void sleep_on_bell(Mailbox &mailbox, uint32_t seen, double seconds);

}  // namespace accelz
