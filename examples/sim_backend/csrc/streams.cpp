#include "streams.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "device.h"
#include "memory.h"

namespace sim {
namespace {

// `queues` is held only for moments, so that a tensor may be freed at any time, also under the GIL.
// `running` is held while work runs, which keeps each queue in order when two threads drain it.
struct State {
  std::mutex queues;
  std::map<c10::StreamId, std::deque<Work>> waiting;
  std::set<c10::StreamId> recorded;  // by some thread now
  std::recursive_mutex running;
  std::atomic<int64_t> unfinished{0};
  std::atomic<c10::StreamId> last_stream{0};
  std::atomic<bool> delays{true};
  std::atomic<c10::StreamId> only{0};  // the one late stream, if there is one
};

State& state() {
  static auto* only = new State;  // never destroyed: tensors outlive static destructors
  return *only;
}

bool late(c10::StreamId stream) {
  const c10::StreamId only = state().only;
  return stream != 0 && state().delays && (only == 0 || only == stream);
}

thread_local std::array<c10::StreamId, kDevices> current{};
thread_local GraphPtr recording;

void check_not_recording(const char* what) {
  TORCH_CHECK(!recording, "work is being captured, and ", what,
              " cannot be: capture only work on tensors that exist, on one stream");
}

void push(c10::StreamId stream, Work work) {
  const std::lock_guard lock(state().queues);
  TORCH_CHECK(state().recorded.count(stream) == 0, "another thread captures this stream's work, and this one's "
              "cannot be captured: call no backward inside a capture");
  state().waiting[stream].push_back(std::move(work));
  ++state().unfinished;
}

// The first piece of work stays in its queue while it runs, so that new work queues behind it.
Work* front(c10::StreamId stream) {
  const std::lock_guard lock(state().queues);
  auto& queue = state().waiting[stream];
  return queue.empty() ? nullptr : &queue.front();
}

Work pop(c10::StreamId stream) {
  const std::lock_guard lock(state().queues);
  auto& queue = state().waiting[stream];
  Work work = std::move(queue.front());
  queue.pop_front();
  --state().unfinished;
  return work;
}

template <typename Enough>
void drain(c10::StreamId stream, const Enough& enough) {
  check_not_recording("waiting for the device, as for a value on it,");
  std::vector<Work> done;  // destroyed outside the lock: destroying what it holds may need the GIL
  std::exception_ptr error;
  {
    const std::lock_guard lock(state().running);
    while (!enough() && !error) {
      Work* work = front(stream);
      if (work == nullptr) break;
      try {
        (*work)();
      } catch (...) {
        error = std::current_exception();
      }
      done.push_back(pop(stream));
    }
  }
  done.clear();
  reap();
  if (error) std::rethrow_exception(error);
}

std::vector<c10::StreamId> streams() {
  const std::lock_guard lock(state().queues);
  std::vector<c10::StreamId> ids;
  for (const auto& [id, queue] : state().waiting) ids.push_back(id);
  return ids;
}

}  // namespace

c10::StreamId current_stream(c10::DeviceIndex device) { return current.at(device); }

c10::StreamId exchange_stream(c10::DeviceIndex device, c10::StreamId stream) {
  return std::exchange(current.at(device), stream);
}

c10::StreamId new_stream() { return ++state().last_stream; }

bool delayed(c10::DeviceIndex device) {
  return (recording && recording->device == device) || late(current_stream(device));
}

void begin_capture(c10::DeviceIndex device) {
  check_not_recording("another capture");
  recording = std::make_shared<Graph>();
  recording->device = device;
  recording->stream = current_stream(device);
  recording->pool = std::make_shared<Pool>();
  const std::lock_guard lock(state().queues);
  state().recorded.insert(recording->stream);
}

GraphPtr end_capture() {
  TORCH_CHECK(recording, "no work is being captured");
  const std::lock_guard lock(state().queues);
  state().recorded.erase(recording->stream);
  return std::exchange(recording, nullptr);
}

std::shared_ptr<Pool> capturing_pool(c10::DeviceIndex device) {
  return recording && recording->device == device ? recording->pool : nullptr;
}

void replay(const GraphPtr& graph) {
  check_not_recording("a replay");
  submit(graph->device, [graph] {
    for (const Work& recorded : graph->works) {
      Work work = recorded;  // running uses it up
      work();
    }
  });
}

void set_delays(bool on) {
  if (!on) synchronize();
  state().delays = on;
}

void set_late(c10::StreamId only) {
  synchronize();
  state().only = only;
}

void submit(c10::DeviceIndex device, Work work) {
  if (recording && recording->device == device) {
    if (current_stream(device) != recording->stream) check_not_recording("work on another stream");
    recording->works.push_back(std::move(work));
  } else if (delayed(device)) {
    push(current_stream(device), std::move(work));
  } else {
    work();
  }
}

bool submit_behind(c10::StreamId stream, Work work) {
  if (recording && recording->stream == stream) {
    recording->works.push_back(std::move(work));
    return true;
  }
  const std::lock_guard lock(state().queues);
  const auto queue = state().waiting.find(stream);
  if (queue == state().waiting.end() || queue->second.empty()) return false;
  queue->second.push_back(std::move(work));
  ++state().unfinished;
  return true;
}

EventPtr record(c10::StreamId stream) {
  check_not_recording("an event");
  auto event = std::make_shared<Event>();
  event->stream = stream;
  const auto pass = [event] {
    event->when = Clock::now();
    event->passed = true;
  };
  if (!submit_behind(stream, pass)) pass();
  return event;
}

void wait(c10::StreamId stream, const EventPtr& event) {
  check_not_recording("a wait for an event");
  if (event->passed || event->stream == stream) return;
  if (!late(stream)) {
    synchronize(event);
  } else {
    push(stream, [event] { synchronize(event); });
  }
}

void synchronize(const EventPtr& event) {
  drain(event->stream, [&] { return event->passed.load(); });
}

void synchronize(c10::StreamId stream) {
  drain(stream, [] { return false; });
}

void synchronize() {
  for (const auto stream : streams()) synchronize(stream);
}

bool busy() { return state().unfinished > 0; }

}  // namespace sim
