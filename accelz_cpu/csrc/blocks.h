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

    char *data(uint32_t block) const { return blocks_[block].segment->data(); }

    // Bytes that are backed by memory.
    size_t bytes() const;

   private:
    struct Block {
        std::unique_ptr<Segment> segment;
        int stream = 0;
        uint64_t number = 0;  // the last collective that used it
        size_t needed = 0;    // the most bytes since the last trim
    };

    bool is_free(const Block &block) const { return consumed_(block.stream) >= block.number; }
    Block *find(size_t bytes);
    void resize(Block &block, size_t bytes);
    void trim();

    Mailbox &mailbox_;
    std::function<uint64_t(int)> consumed_;
    std::vector<Block> blocks_;
    uint64_t acquired_ = 0;
};

}  // namespace accelz
