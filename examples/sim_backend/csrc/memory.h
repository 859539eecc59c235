// Device memory: host memory that is counted to the byte, limited, and poisoned when it is not in use.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

namespace sim {

struct Counters {
  size_t allocated = 0;  // bytes in use now
  size_t peak = 0;       // the most since start or reset_peak()
  size_t capacity = 0;   // allocating more than this is out of memory
};

Counters counters(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
void set_capacity(c10::DeviceIndex device, size_t nbytes);

// The nth allocation from now, on any device, is out of memory; 0 takes the fault back.
void fail_allocation(uint64_t nth);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
// Throws where the pointer is not device memory.
c10::DeviceIndex device_of(const void* pointer);

// Freeing the block waits for what is queued on the stream when it is freed.
void note_use(const void* pointer, c10::StreamId stream);

// Resize in place: shrinking to 0 frees, growing keeps the content and poisons the rest.
void resize_storage(const c10::Storage& storage, size_t nbytes);

// Give freed blocks back to the host once no queued work can still point at them.
void reap();

}  // namespace sim
