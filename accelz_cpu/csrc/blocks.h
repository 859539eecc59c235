// The blocks in which a rank publishes its parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "mailbox.h"
#include "segment.h"

namespace accelz {

class Blocks {
   public:
    // consumed(stream): the last collective up to which all other ranks have read what this one published.
    Blocks(Mailbox &mailbox, std::function<uint64_t(int)> consumed);

    // Returns a block of at least `bytes` for one collective. Throws std::runtime_error if memory is short.
    //
    // It is the smallest free block that is large enough; else the largest free one is replaced by a larger one;
    // else a block is added. So there are as many blocks as collectives have been in progress at once.
    uint32_t acquire(size_t bytes, int stream, uint64_t number);

    // Returns a block for the caller to write to until a collective begins with it; or null if the caller has LENT of
    // them. The block is used again once it is no longer `lent` and others have read it. Throws std::runtime_error.
    std::shared_ptr<Segment> lend(size_t bytes);

    // Takes a lent block that has these bytes for one collective, too. Returns whether there is one.
    bool find_lent(const char *data, size_t bytes, int stream, uint64_t number, uint32_t &block, uint64_t &offset);

    char *data(uint32_t block) const { return blocks_[block].segment->data(); }

    // Bytes that are backed by memory.
    size_t bytes() const;

   private:
    struct Block {
        std::shared_ptr<Segment> segment;  // the caller's, too, where it is lent
        int stream = 0;
        uint64_t number = 0;  // the last collective that used it
        size_t needed = 0;    // the most bytes since the last trim
    };

    // 0 if there was no memory for it.
    static size_t capacity_of(const Block &block) { return block.segment ? block.segment->capacity() : 0; }
    static bool is_lent(const Block &block) {
        return block.segment && block.segment->lent.load(std::memory_order_acquire);
    }
    bool is_free(const Block &block) const { return !is_lent(block) && consumed_(block.stream) >= block.number; }
    Block *find(size_t bytes);
    void resize(Block &block, size_t bytes);
    void trim();

    Mailbox &mailbox_;
    std::function<uint64_t(int)> consumed_;
    std::vector<Block> blocks_;
    uint64_t acquired_ = 0;
};

}  // namespace accelz
