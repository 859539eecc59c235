// Streams. Stream 0 of a device runs work at once. On any other stream, work waits in a queue until it is
// needed: by a wait for an event, a blocking copy or a synchronize. A read without a wait sees what was
// there before, which for fresh memory is poison.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <vector>

namespace sim {

using Work = std::function<void()>;
using Clock = std::chrono::steady_clock;

struct Event {
  c10::StreamId stream = 0;
  std::atomic<bool> passed = false;
  Clock::time_point when;
};
using EventPtr = std::shared_ptr<Event>;

struct Pool;

// Work that was recorded instead of run, to be run as often as wanted. It has the addresses of what it works
// on, and the memory that it allocated meanwhile.
struct Graph {
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;  // on which it was recorded
  std::vector<Work> works;
  std::shared_ptr<Pool> pool;
};
using GraphPtr = std::shared_ptr<Graph>;

c10::StreamId current_stream(c10::DeviceIndex device);
c10::StreamId exchange_stream(c10::DeviceIndex device, c10::StreamId stream);
c10::StreamId new_stream();

// Record what this thread submits to the device's current stream from now on. Meanwhile it may use no other
// stream of the device, and nothing that waits or records events; and no other thread may use this stream.
void begin_capture(c10::DeviceIndex device);
GraphPtr end_capture();
// The memory that this thread's allocations on the device are from: that of the graph being recorded, or null.
std::shared_ptr<Pool> capturing_pool(c10::DeviceIndex device);
// Queue the recorded work on the device's current stream.
void replay(const GraphPtr& graph);

// Whether work submitted to the device's current stream now would wait in its queue, or in a graph.
bool delayed(c10::DeviceIndex device);
// False makes every stream run its work at once.
void set_delays(bool on);
// Make only this stream's work wait in a queue; 0: that of every stream except stream 0.
void set_late(c10::StreamId only);

// Run the work on the device's current stream: at once, or when the stream is drained.
void submit(c10::DeviceIndex device, Work work);
// Queue the work on that stream if other work is waiting there; otherwise return false.
bool submit_behind(c10::StreamId stream, Work work);

EventPtr record(c10::StreamId stream);
// Make later work on the stream run after the event.
void wait(c10::StreamId stream, const EventPtr& event);
// Run queued work until the event has passed, the stream is empty, or all streams are empty.
void synchronize(const EventPtr& event);
void synchronize(c10::StreamId stream);
void synchronize();

// Whether anything is queued anywhere.
bool busy();

}  // namespace sim
