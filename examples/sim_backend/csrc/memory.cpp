#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device.h"
#include "streams.h"

namespace sim {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kDefaultCapacity = size_t{2} << 30;
constexpr int kPoison = 0xFF;  // NaN in every floating type, -1 in every integer type

struct Block {
  size_t nbytes;
  c10::DeviceIndex device;
  c10::StreamId stream;  // whose order decides when freed memory may be reused
  std::vector<c10::StreamId> users;  // other streams, named by record_stream
  std::weak_ptr<Pool> pool = {};     // of the graph in whose capture it was allocated
};

struct Heap {
  std::mutex mutex;
  std::unordered_map<void*, Block> blocks;
  std::array<Counters, kDevices> counters;
  std::vector<void*> graveyard;  // freed while queued work might still point at them
  uint64_t fail_in = 0;
};

Heap& heap() {
  static Heap* only = [] {  // never destroyed: tensors outlive static destructors
    auto* made = new Heap;
    for (auto& counter : made->counters) counter.capacity = kDefaultCapacity;
    return made;
  }();
  return *only;
}

void* host_alloc(size_t nbytes) {
  void* pointer = nullptr;
  TORCH_CHECK(posix_memalign(&pointer, kAlignment, nbytes) == 0, "the host has no memory left for ",
              nbytes, " bytes of simulated device memory");
  return pointer;
}

void out_of_memory(size_t nbytes, c10::DeviceIndex device, const Counters& now, const char* why) {
  TORCH_CHECK_WITH(OutOfMemoryError, false, "sim:", int(device), " is out of memory", why,
                   ": wanted ", nbytes, " bytes, free ", now.capacity - now.allocated, " of ",
                   now.capacity, " bytes");
}

void reserve(void* pointer, const Block& block) {
  auto& h = heap();
  const std::lock_guard lock(h.mutex);
  auto& now = h.counters[block.device];
  if (h.fail_in > 0 && --h.fail_in == 0) {
    out_of_memory(block.nbytes, block.device, now, " (an injected fault)");
  }
  if (now.allocated + block.nbytes > now.capacity || now.allocated > now.capacity) {
    out_of_memory(block.nbytes, block.device, now, "");
  }
  now.allocated += block.nbytes;
  now.peak = std::max(now.peak, now.allocated);
  h.blocks.emplace(pointer, block);
}

Block forget(void* pointer) {
  auto& h = heap();
  const std::lock_guard lock(h.mutex);
  const auto found = h.blocks.find(pointer);
  TORCH_INTERNAL_ASSERT(found != h.blocks.end(), "freeing what is not device memory");
  const Block block = found->second;
  h.blocks.erase(found);
  h.counters[block.device].allocated -= block.nbytes;
  return block;
}

// To be freed once no stream is busy, when all work queued before this is done.
void bury(void* pointer) {
  auto& h = heap();
  const std::lock_guard lock(h.mutex);
  h.graveyard.push_back(pointer);
}

Work poisoning(void* pointer, const Block& block) {
  return [pointer, nbytes = block.nbytes] { std::memset(pointer, kPoison, nbytes); };
}

void poison_behind(void* pointer, const Block& block) {
  const auto poison = poisoning(pointer, block);
  // Work on the stream that allocated it runs first; for other streams, waiting is up to the user.
  if (!submit_behind(block.stream, poison)) poison();
  bury(pointer);
  reap();
}

std::vector<c10::StreamId> users_of(void* pointer) {
  auto& h = heap();
  const std::lock_guard lock(h.mutex);
  const auto found = h.blocks.find(pointer);
  return found == h.blocks.end() ? std::vector<c10::StreamId>{} : found->second.users;
}

// Gives the block to the graph that has its memory, if there is one. What is captured afterwards may use it.
bool free_in_pool(void* pointer) {
  Block block;
  {
    auto& h = heap();
    const std::lock_guard lock(h.mutex);
    const auto found = h.blocks.find(pointer);
    if (found == h.blocks.end()) return false;
    block = found->second;
  }
  const auto pool = block.pool.lock();
  if (!pool) return false;
  if (pool == capturing_pool(block.device)) submit_behind(block.stream, poisoning(pointer, block));
  const std::lock_guard lock(pool->mutex);
  pool->idle.emplace(block.nbytes, pointer);
  return true;
}

void* take_from(Pool& pool, size_t nbytes) {
  const std::lock_guard lock(pool.mutex);
  const auto found = pool.idle.find(nbytes);
  return found == pool.idle.end() ? nullptr : pool.idle.extract(found).mapped();
}

// A block that other streams use stays in use, and counted, until the work now queued on them is done.
void free_block(void* pointer) {
  if (pointer == nullptr || free_in_pool(pointer)) return;
  const std::shared_ptr<void> last(pointer, [](void* freed) { poison_behind(freed, forget(freed)); });
  for (const auto stream : users_of(pointer)) submit_behind(stream, [last] {});
}

// As torch.accelerator sees it: one pool, in which what is reserved is what is allocated.
c10::CachingDeviceAllocator::DeviceStats stats_of(const Counters& now) {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  c10::CachingDeviceAllocator::DeviceStats stats;
  for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes}) {
    (*bytes)[kAll].current = static_cast<int64_t>(now.allocated);
    (*bytes)[kAll].peak = static_cast<int64_t>(now.peak);
  }
  return stats;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const auto device = current_device();
    const auto pool = capturing_pool(device);
    void* pointer = pool ? take_from(*pool, nbytes) : nullptr;
    if (pointer == nullptr && nbytes > 0) {
      pointer = host_alloc(nbytes);
      try {
        reserve(pointer, {nbytes, device, current_stream(device), {}, pool});
      } catch (...) {
        std::free(pointer);
        throw;
      }
      std::memset(pointer, kPoison, nbytes);
    }
    return {pointer, pointer, &free_block, c10::Device(kType, device)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* target, const void* source, size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is cached
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    note_use(pointer.get(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return stats_of(counters(device));
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}  // nothing is accumulated
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto now = counters(device);
    return {now.capacity - std::min(now.allocated, now.capacity), now.capacity};
  }
};

struct PinnedBlocks {
  std::mutex mutex;
  std::map<const char*, size_t> sizes;
};

PinnedBlocks& pinned_blocks() {
  static auto* only = new PinnedBlocks;
  return *only;
}

void free_pinned(void* pointer) {
  if (pointer == nullptr) return;
  auto& pinned = pinned_blocks();
  const std::lock_guard lock(pinned.mutex);
  pinned.sizes.erase(static_cast<const char*>(pointer));
  std::free(pointer);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* pointer = nullptr;
    if (nbytes > 0) {
      pointer = host_alloc(nbytes);
      auto& pinned = pinned_blocks();
      const std::lock_guard lock(pinned.mutex);
      pinned.sizes.emplace(static_cast<const char*>(pointer), nbytes);
    }
    return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }

  void copy_data(void* target, const void* source, size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }

  // Queued copies hold their host storage themselves, and nothing is cached.
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;

REGISTER_ALLOCATOR(kType, &the_device_allocator)
REGISTER_HOST_ALLOCATOR(kType, &the_pinned_allocator)

}  // namespace

Pool::~Pool() {
  for (const auto& [nbytes, pointer] : idle) poison_behind(pointer, forget(pointer));
}

Counters counters(c10::DeviceIndex device) {
  const std::lock_guard lock(heap().mutex);
  return heap().counters.at(device);
}

void reset_peak(c10::DeviceIndex device) {
  const std::lock_guard lock(heap().mutex);
  auto& now = heap().counters.at(device);
  now.peak = now.allocated;
}

void set_capacity(c10::DeviceIndex device, size_t nbytes) {
  const std::lock_guard lock(heap().mutex);
  heap().counters.at(device).capacity = nbytes;
}

void fail_allocation(uint64_t nth) {
  const std::lock_guard lock(heap().mutex);
  heap().fail_in = nth;
}

c10::Allocator* device_allocator() { return &the_device_allocator; }

c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

bool is_pinned(const void* pointer) {
  auto& pinned = pinned_blocks();
  const auto* wanted = static_cast<const char*>(pointer);
  const std::lock_guard lock(pinned.mutex);
  auto above = pinned.sizes.upper_bound(wanted);
  if (above == pinned.sizes.begin()) return false;
  const auto& [start, nbytes] = *--above;
  return wanted < start + nbytes;
}

c10::DeviceIndex device_of(const void* pointer) {
  auto& h = heap();
  const std::lock_guard lock(h.mutex);
  const auto found = h.blocks.find(const_cast<void*>(pointer));
  TORCH_CHECK(found != h.blocks.end(), "the pointer is not the start of a block on a sim device");
  return found->second.device;
}

void note_use(const void* pointer, c10::StreamId stream) {
  auto& h = heap();
  const std::lock_guard lock(h.mutex);
  const auto found = h.blocks.find(const_cast<void*>(pointer));
  if (found != h.blocks.end()) found->second.users.push_back(stream);
}

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  const auto old_nbytes = storage.nbytes();
  if (nbytes == old_nbytes) return;
  const auto device = storage.device().index();
  const auto before = exchange_device(device);
  c10::DataPtr fresh;
  try {
    fresh = the_device_allocator.allocate(nbytes);
  } catch (...) {
    exchange_device(before);
    throw;
  }
  exchange_device(before);
  if (const auto kept = std::min(nbytes, old_nbytes); kept > 0) {
    synchronize(current_stream(device));
    std::memcpy(fresh.get(), storage.data(), kept);
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(nbytes);
}

void reap() {
  auto& h = heap();
  const std::lock_guard lock(h.mutex);
  if (busy()) return;
  for (void* pointer : h.graveyard) std::free(pointer);
  h.graveyard.clear();
}

}  // namespace sim
