#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace accelz {
namespace {

struct Loop {
    size_t tasks;
    void (*body)(void *, size_t);
    void *context;
    std::fenv_t environment;
    std::atomic<size_t> next{0};

    void work() {
        for (size_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(context, task);
    }
};

class Pool {
   public:
    void run(Loop &loop, int helpers) {
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn || !(helpers = grow(helpers))) return loop.work();
        std::fegetenv(&loop.environment);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            loop_ = &loop;
            wanted_ = helpers;
            number_++;
        }
        wake_.notify_all();
        loop.work();
        std::unique_lock<std::mutex> lock(mutex_);
        loop_ = nullptr;  // a worker that wakes up only now finds nothing to do, and is not waited for
        done_.wait(lock, [&] { return active_ == 0; });
    }

   private:
    int grow(int helpers) {
        try {
            for (; threads_ < helpers; threads_++) start();
        } catch (const std::system_error &) {
            // no more threads can be started: those that exist do the work
        }
        return std::min(helpers, threads_);
    }

    void start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the interpreter's threads
        struct Restore {
            sigset_t &mask;
            ~Restore() { pthread_sigmask(SIG_SETMASK, &mask, nullptr); }
        } restore{before};
        std::thread([this] { serve(); }).detach();
    }

    void serve() {
        size_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return loop_ && number_ != seen && wanted_ > 0; });
            seen = number_;
            Loop &loop = *loop_;
            wanted_--;
            active_++;
            lock.unlock();
            std::fesetenv(&loop.environment);
            loop.work();
            lock.lock();
            if (--active_ == 0) done_.notify_one();
        }
    }

    std::mutex turn_;  // held by the thread whose loop runs
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    Loop *loop_ = nullptr;
    size_t number_ = 0;
    int wanted_ = 0, active_ = 0, threads_ = 0;
};

// Never destroyed, because workers may outlive static destructors. A forked child has none of the threads and
// perhaps locked mutexes, so it gets a new pool.
Pool *&pool() {
    static Pool *instance = [] {
        pthread_atfork(nullptr, nullptr, [] { pool() = new Pool; });
        return new Pool;
    }();
    return instance;
}

}  // namespace

void run_tasks(size_t tasks, int threads, void (*body)(void *, size_t), void *context) {
    Loop loop{tasks, body, context, {}};
    const int helpers = int(std::min<size_t>(tasks, size_t(std::max(threads, 1)))) - 1;
    if (helpers <= 0) return loop.work();
    pool()->run(loop, helpers);
}

}  // namespace accelz
