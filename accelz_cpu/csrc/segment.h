// Shared memory without a name: it lives as long as a process has it mapped or open, and no longer.
//
// A segment is an anonymous file (memfd). Another process of the same user opens it through the owner's
// entry in /proc, so there is nothing to unlink, nothing that a killed process could leave behind, and no
// limit but the machine's memory (the size of /dev/shm does not matter). Neither pages nor descriptors reach forked
// children.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>

namespace accelz {

// A stretch of shared memory in this process.
struct Mapping {
    Mapping(char *start, size_t length) : data(start), bytes(length) {}
    ~Mapping();
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;

    char *const data;
    const size_t bytes;
};

// A segment that this process owns, mapped for reading and writing.
class Segment {
   public:
    // Address space of `capacity` bytes. Throws std::runtime_error.
    explicit Segment(size_t capacity);
    ~Segment();
    Segment(const Segment &) = delete;
    Segment &operator=(const Segment &) = delete;

    // Make sure that the first `bytes` bytes have memory behind them: later accesses cannot fail. Throws
    // std::runtime_error where there is not enough.
    void reserve(size_t bytes);

    // Give back what lies behind the first `bytes` bytes, from all processes that have it mapped.
    void trim(size_t bytes);

    char *data() const { return mapping_->data; }
    int descriptor() const { return descriptor_; }
    size_t capacity() const { return mapping_->bytes; }
    size_t reserved() const { return reserved_; }

   private:
    int descriptor_ = -1;
    size_t reserved_ = 0;
    std::shared_ptr<Mapping> mapping_;
};

// Map a segment of any process of this host. One of this very process is not mapped a second time. Throws
// std::runtime_error.
std::shared_ptr<Mapping> map_segment(pid_t owner, int descriptor, size_t capacity, bool writable);

}  // namespace accelz
