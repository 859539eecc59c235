// Shared memory without a name: it lives as long as a process has it mapped or open, and no longer.
//
// A segment is an anonymous file (memfd). Another process of the same user opens it through the owner's
// entry in /proc, so there is nothing to unlink, nothing that a killed process could leave behind, and no
// limit but the machine's memory (the size of /dev/shm does not matter).
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace accelz {

// A segment that this process owns, mapped for reading and writing. Its pages do not reach forked children.
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

    char *data() const { return data_; }
    int descriptor() const { return descriptor_; }
    size_t capacity() const { return capacity_; }
    size_t reserved() const { return reserved_; }

   private:
    int descriptor_ = -1;
    char *data_ = nullptr;
    size_t capacity_ = 0, reserved_ = 0;
};

// A segment of any process of this host. One of this very process is not mapped a second time.
class View {
   public:
    View() = default;
    // Throws std::runtime_error.
    View(pid_t owner, int descriptor, size_t capacity, bool writable);
    ~View();
    View(View &&other) noexcept;
    View &operator=(View &&other) noexcept;

    char *data() const { return data_; }

   private:
    char *data_ = nullptr;
    size_t mapped_ = 0;  // bytes to unmap; 0 where the owner's mapping is used
};

}  // namespace accelz
