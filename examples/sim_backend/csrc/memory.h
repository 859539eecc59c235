// Device memory: host memory that is counted to the byte, limited, and poisoned when it is not in use.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace sim {

struct Counters {
  size_t allocated = 0;  // bytes in use now
  size_t peak = 0;       // the most since the start or reset_peak()
  size_t capacity = 0;   // allocating beyond this is out of memory
};

// The memory of a graph: what was allocated while it was captured. It stays in use, and counted, until the
// graph is gone, because each replay writes to it.
struct Pool {
  Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();

  std::mutex mutex;
  std::multimap<size_t, void*> idle;  // blocks by size that no tensor has: free for what is captured later
};

Counters counters(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
void set_capacity(c10::DeviceIndex device, size_t nbytes);

// Make the nth allocation from now, on any device, run out of memory; 0 cancels the fault.
void fail_allocation(uint64_t nth);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
// Throws if the pointer is not device memory.
c10::DeviceIndex device_of(const void* pointer);

// Make freeing the block wait for the work that is queued on the stream when it is freed.
void note_use(const void* pointer, c10::StreamId stream);

// Resize in place: shrinking to 0 frees, growing keeps the content and poisons the rest.
void resize_storage(const c10::Storage& storage, size_t nbytes);

// Give freed blocks back to the host once no queued work can still point at them.
void reap();

}  // namespace sim
