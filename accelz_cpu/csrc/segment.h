// Shared memory without a name, which lives only as long as a process has it mapped or open.
//
// A segment is an anonymous file (memfd). Another process of the same user opens it through the owner's
// entry in /proc, so there is nothing to unlink, nothing that a killed process could leave behind, and no
// limit except the machine's memory (the size of /dev/shm does not matter). Forked children get neither its pages
// nor its descriptors.
#pragma once

#include <sys/types.h>

#include <atomic>
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
    // Reserves address space for `capacity` bytes. Throws std::runtime_error.
    explicit Segment(size_t capacity);
    ~Segment();
    Segment(const Segment &) = delete;
    Segment &operator=(const Segment &) = delete;

    // Back the first `bytes` bytes with memory, so that later accesses cannot fail. Throws std::runtime_error if
    // there is not enough.
    void reserve(size_t bytes);

    // Give back the memory after the first `bytes` bytes, in all processes that have it mapped.
    void trim(size_t bytes);

    char *data() const { return mapping_->data; }
    int descriptor() const { return descriptor_; }
    size_t capacity() const { return mapping_->bytes; }
    size_t reserved() const { return reserved_; }

    std::atomic<bool> lent{false};  // somebody beside the owner may write to it

   private:
    int descriptor_ = -1;
    size_t reserved_ = 0;
    std::shared_ptr<Mapping> mapping_;
};

// Map a segment of any process on this host. A segment of this same process is not mapped a second time. Throws
// std::runtime_error.
std::shared_ptr<Mapping> map_segment(pid_t owner, int descriptor, size_t capacity, bool writable);

}  // namespace accelz
