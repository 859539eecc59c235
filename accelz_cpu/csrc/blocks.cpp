#include "blocks.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace accelz {
namespace {

constexpr size_t SMALLEST = size_t(1) << 14;  // bytes
constexpr uint64_t TRIM_EVERY = 256;          // collectives; then blocks give back what none of them has needed

// Rounds up in steps of about an eighth, so that similar sizes can use the same block.
size_t rounded_up(size_t bytes) {
    size_t step = SMALLEST;
    while (step * 16 <= bytes) step *= 2;
    return (bytes + step - 1) / step * step;
}

}  // namespace

Blocks::Blocks(Mailbox &mailbox, std::function<uint64_t(int)> consumed)
    : mailbox_(mailbox), consumed_(std::move(consumed)) {
    blocks_.reserve(BLOCKS);
}

uint32_t Blocks::acquire(size_t bytes, int stream, uint64_t number) {
    if (++acquired_ % TRIM_EVERY == 0) trim();
    Block *block = find(bytes);
    if (capacity_of(*block) < bytes) resize(*block, bytes);
    block->segment->reserve(bytes);
    block->stream = stream;
    block->number = number;
    block->needed = std::max(block->needed, bytes);
    return uint32_t(block - blocks_.data());
}

std::shared_ptr<Segment> Blocks::lend(size_t bytes) {
    if (std::count_if(blocks_.begin(), blocks_.end(), is_lent) >= LENT) return nullptr;
    const auto segment = blocks_[acquire(bytes, 0, 0)].segment;
    segment->lent = true;
    return segment;
}

bool Blocks::find_lent(const char *data, size_t bytes, int stream, uint64_t number, uint32_t &block,
                       uint64_t &offset) {
    for (Block &each : blocks_) {
        if (!is_lent(each)) continue;
        const char *const begin = each.segment->data();
        if (data < begin || data + bytes > begin + each.segment->capacity()) continue;
        each.stream = stream;
        each.number = number;
        block = uint32_t(&each - blocks_.data());
        offset = uint64_t(data - begin);
        return true;
    }
    return false;
}

Blocks::Block *Blocks::find(size_t bytes) {
    Block *fitting = nullptr, *largest = nullptr;
    for (Block &block : blocks_) {
        if (!is_free(block)) continue;
        const size_t capacity = capacity_of(block);
        if (capacity >= bytes && (!fitting || capacity < capacity_of(*fitting))) fitting = &block;
        if (!largest || capacity > capacity_of(*largest)) largest = &block;
    }
    if (fitting || largest) return fitting ? fitting : largest;
    return &blocks_.emplace_back();
}

void Blocks::resize(Block &block, size_t bytes) {
    block.segment.reset(new Segment(rounded_up(bytes)));
    BlockEntry &entry = mailbox_.blocks[&block - blocks_.data()];
    entry.descriptor = block.segment->descriptor();
    entry.generation++;
    entry.capacity = block.segment->capacity();
}

void Blocks::trim() {
    for (Block &block : blocks_) {
        if (block.segment && is_free(block)) block.segment->trim(block.needed);
        block.needed = 0;
    }
}

size_t Blocks::bytes() const {
    size_t total = 0;
    for (const Block &block : blocks_)
        if (block.segment) total += block.segment->reserved();
    return total;
}

}  // namespace accelz
