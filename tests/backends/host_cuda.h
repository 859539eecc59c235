// CUDA C++ on the host, enough of it to run the kernels of accelz_cuda one thread after another.
//
// Every thread of a block is a fiber. Barriers and warp shuffles switch to the next fiber until all
// that take part have arrived; blocks run one by one. Vector accesses check their alignment. The
// library also answers to the few functions of the driver API that the package calls, so that its
// own launching code runs against it.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __shared__ static

namespace host {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kStackBytes = 64 << 10;

struct Index {
  unsigned x;
};

struct Barrier {
  int expected, arrived = 0, passed = 0;
};

struct Grid {
  Index thread, block, size;
  ucontext_t start_from, starts[kThreads];
  jmp_buf scheduler, fibers[kThreads];  // once a fiber has started: a jump makes no system call
  std::vector<char> stacks = std::vector<char>(kThreads * kStackBytes);
  bool started[kThreads], done[kThreads];
  Barrier block_barrier, warp_barriers[kThreads / kLanes];
  unsigned lanes[kThreads];
  const std::function<void()>* work = nullptr;
};

inline Grid grid;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "host_cuda: %s (block %u, thread %u)\n", what, grid.block.x, grid.thread.x);
  std::abort();
}

inline void wait(Barrier& barrier) {
  const int turn = barrier.passed;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.passed;
  }
  while (barrier.passed == turn) {
    if (_setjmp(grid.fibers[grid.thread.x]) == 0) _longjmp(grid.scheduler, 1);
  }
}

// What `read` makes of the values of a warp's lanes.
template <class Read>
auto exchange(unsigned value, Read read) {
  const unsigned warp = grid.thread.x / kLanes;
  grid.lanes[grid.thread.x] = value;
  wait(grid.warp_barriers[warp]);
  const auto result = read(grid.lanes + warp * kLanes, grid.thread.x % kLanes);
  wait(grid.warp_barriers[warp]);
  return result;
}

inline void fiber() {
  (*grid.work)();
  grid.done[grid.thread.x] = true;
  _longjmp(grid.scheduler, 1);
}

inline void resume(int thread) {
  grid.thread.x = thread;
  if (_setjmp(grid.scheduler) != 0) return;
  if (grid.started[thread]) _longjmp(grid.fibers[thread], 1);
  grid.started[thread] = true;
  swapcontext(&grid.start_from, &grid.starts[thread]);
}

inline void run_block() {
  grid.block_barrier = {kThreads};
  for (auto& barrier : grid.warp_barriers) barrier = {kLanes};
  for (int t = 0; t < kThreads; ++t) {
    ucontext_t& context = grid.starts[t];
    getcontext(&context);
    context.uc_stack.ss_sp = grid.stacks.data() + t * kStackBytes;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, fiber, 0);
    grid.started[t] = grid.done[t] = false;
  }
  int left = kThreads;
  for (int rounds = 0; left > 0; ++rounds) {
    if (rounds > 1000) fail("a barrier that not all threads reach");
    for (int t = 0; t < kThreads; ++t) {
      if (grid.done[t]) continue;
      resume(t);
      left -= grid.done[t] ? 1 : 0;
    }
  }
}

inline void run(unsigned blocks, const std::function<void()>& work) {
  grid.work = &work;
  grid.size.x = blocks;
  for (grid.block.x = 0; grid.block.x < blocks; ++grid.block.x) run_block();
}

struct Entry {
  std::size_t size;
  void (*run)(const void* arguments, unsigned blocks);
};

inline std::map<std::string, Entry>& entries() {
  static std::map<std::string, Entry> all;
  return all;
}

inline bool add(const char* name, Entry entry) { return entries().emplace(name, entry).second; }

template <class T>
const T& aligned(const T* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof(T))
    fail("a vector access at an address that is not aligned");
  return *address;
}

}  // namespace host

#define KERNEL(NAME, ARGUMENTS, MIN_BLOCKS)                                               \
  static void NAME(const ARGUMENTS& a);                                                   \
  static const bool NAME##_added =                                                        \
      host::add(#NAME, {sizeof(ARGUMENTS), [](const void* arguments, unsigned blocks) {   \
                          const ARGUMENTS& a = *static_cast<const ARGUMENTS*>(arguments); \
                          host::run(blocks, [&] { NAME(a); });                            \
                        }});                                                              \
  static void NAME(const ARGUMENTS& a)

#define threadIdx host::grid.thread
#define blockIdx host::grid.block
#define gridDim host::grid.size

struct uint4 {
  unsigned x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

template <class T>
T __ldg(const T* from) {
  return host::aligned(from);
}
template <class T>
T load_vector(const void* from) {
  return host::aligned(static_cast<const T*>(from));
}
template <class T>
void store_vector(void* to, T value) {
  const_cast<T&>(host::aligned(static_cast<T*>(to))) = value;
}

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline void __syncthreads() { host::wait(host::grid.block_barrier); }
inline unsigned __shfl_xor_sync(unsigned, unsigned value, int distance) {
  return host::exchange(value, [=](auto* of, unsigned lane) { return of[lane ^ distance]; });
}
inline float __shfl_xor_sync(unsigned, float value, int distance) {
  return __uint_as_float(__shfl_xor_sync(0, __float_as_uint(value), distance));
}
inline float __shfl_sync(unsigned, float value, int from, int width) {
  return __uint_as_float(host::exchange(__float_as_uint(value), [=](auto* of, unsigned lane) {
    return of[lane / width * width + from];
  }));
}
inline bool __any_sync(unsigned, bool value) {
  return host::exchange(value, [](auto* of, unsigned) {
    return std::any_of(of, of + host::kLanes, [](unsigned lane) { return lane != 0; });
  });
}

using std::max;
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float approximate_sqrt(float value) { return std::sqrt(value); }

inline float f16_to(unsigned short bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}
inline unsigned short f16_from(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  unsigned short bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
