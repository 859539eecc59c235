// A few worker threads that help the calling thread through one loop at a time.
#pragma once

#include <cstddef>
#include <type_traits>

namespace accelz {

// Call body(context, i) for every i below tasks, on at most `threads` threads, including the caller.
//
// Workers start when they are first needed, take over the caller's floating-point environment (rounding,
// flushing of subnormals) for the loop, and are started anew in a forked child. While one thread runs a loop,
// the loops of other threads run on their callers alone.
void run_tasks(size_t tasks, int threads, void (*body)(void *context, size_t task), void *context);

template <class Body>
void run_tasks(size_t tasks, int threads, Body &&body) {
    run_tasks(
        tasks, threads,
        [](void *context, size_t task) { (*static_cast<std::remove_reference_t<Body> *>(context))(task); }, &body);
}

// Split [0, numel) into pieces of `piece` and call body(begin, end) for each.
template <class Body>
void run_pieces(size_t numel, size_t piece, int threads, Body &&body) {
    run_tasks((numel + piece - 1) / piece, threads, [&](size_t task) {
        const size_t begin = task * piece;
        body(begin, begin + piece < numel ? begin + piece : numel);
    });
}

}  // namespace accelz
