// Collectives through shared memory, from one rank's side.
//
// A rank that starts a collective copies its part into one of its blocks and posts a note in its mailbox, without
// waiting for other ranks. When it finishes the collective, it waits for the others' notes and reads their blocks.
// A block is free again once every other rank has consumed its contents. A rank's caller may fill a block itself, with
// the input of a reduce-scatter: then nothing is copied. No step of a rank depends on another rank's finishing
// anything, so collectives may be finished in any order. If several threads finish the same collective, the first one
// does the work, and the others wait for it.
//
// Sums are computed by the rank that needs them, over all ranks' parts in rank order.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "blocks.h"
#include "call.h"
#include "mailbox.h"
#include "peer.h"
#include "segment.h"

namespace accelz {

struct Request {
    Call call;
    char *output = nullptr;
    const char *input = nullptr;
    double timeout = 0;  // seconds
    std::vector<uint64_t> received, sent;  // all-to-all only: elements by rank
};

// Functions throw std::runtime_error; a failed collective ends the group, and the other ranks are told.
class Channel {
   public:
    Channel(int rank, int size);

    int size() const { return size_; }
    int descriptor() const { return own_.descriptor(); }
    void connect(const int64_t *processes, const int *descriptors);
    int64_t start(const Request &request, int threads);
    void finish(int64_t ticket, int threads);
    void abandon(int64_t ticket);
    void fail(const char *reason);
    std::shared_ptr<Segment> lend(size_t bytes);
    size_t bytes() const;
    void leave(double linger);

   private:
    enum State { PENDING, FINISHING, DONE };
    struct Ticket {
        Request request;
        State state = DONE;
    };

    void make_room(std::unique_lock<std::mutex> &lock, const Request &request, int threads);
    void publish(const Request &request, uint64_t number, int threads);
    bool is_in_block(const Request &request, uint64_t number, Post &post);
    size_t published_bytes(const Request &request) const;
    size_t head_bytes() const;
    void copy_parcels(const Request &request, char *to, int threads) const;
    void copy_shard(const Request &request, char *to, int threads) const;
    void copy_part(const Request &request, char *to, int threads) const;

    void wait_for_all(const Request &request, uint64_t number);
    bool all_posted(const Call &call, uint64_t number) const;
    void check_others() const;
    Peer *find_gone(int stream, uint64_t number) const;
    std::runtime_error gone_error(const Call &call, uint64_t number, const Peer &peer) const;
    std::runtime_error timeout_error(const Request &request, uint64_t number) const;

    void collect(const Request &request, uint64_t number, int threads);
    void collect_shards(const Request &request, uint64_t number, int threads);
    void collect_parcels(const Request &request, uint64_t number, int threads);
    void collect_sum(const Request &request, uint64_t number, int threads);
    const char *data_of(int rank, int stream, uint64_t number);

    bool claim(int stream, uint64_t number, Request &request);
    void settle(int stream, uint64_t number, bool complete);
    void consume(int stream, uint64_t number);
    void complete_forgotten(int stream, int threads);
    uint64_t consumed_by_others(int stream) const;
    uint64_t consumed_by_all(int stream) const;
    bool all_read() const;
    void ring_others();
    void check_usable() const;
    void check_own(const Request &request) const;
    template <class Body>
    auto or_fail(Body &&body) -> decltype(body());

    const int rank_, size_;
    Segment own_;
    Mailbox &mine_;
    std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null at this rank's own place
    std::chrono::steady_clock::duration spin_;
    std::atomic<bool> gave_up_{false};
    mutable std::mutex mutex_;  // guards the members below
    std::condition_variable settled_;  // a thread has finished a collective, or failed to
    Blocks blocks_;
    Ticket tickets_[STREAMS][RING];
    uint64_t next_[STREAMS] = {1, 1};
};

}  // namespace accelz
