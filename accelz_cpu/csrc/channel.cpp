#include "channel.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <numeric>
#include <thread>
#include <utility>

#include "accelz_cpu.h"
#include "errors.h"
#include "isa.h"
#include "pool.h"
#include "reduce.h"

namespace accelz {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t PIECE = size_t(1) << 18;  // bytes that a thread works on at a time
constexpr size_t STREAM_FROM = size_t(4) << 20;  // bytes: longer copies bypass the cache, to keep what it holds
constexpr uint64_t MANY = 16;              // collectives of a stream in progress
constexpr double LOOK_SECONDS = 0.005;     // between checks of whether the others still live
constexpr auto PAUSE = std::chrono::microseconds(5);
constexpr auto SPIN = std::chrono::microseconds(100);
constexpr auto SPIN_WHEN_CROWDED = std::chrono::microseconds(2);

// Another rank's failure, which that rank has told all others already.
struct GaveUp : std::runtime_error {
    using std::runtime_error::runtime_error;
};

Mailbox &make_mailbox(Segment &segment, int rank, int size) {
    segment.reserve(sizeof(Mailbox));
    Mailbox &mailbox = *new (segment.data()) Mailbox{};
    mailbox.magic = MAGIC;
    mailbox.rank = rank;
    mailbox.size = size;
    return mailbox;
}

// Spinning is fast only if nobody else needs the processor.
Clock::duration spin_time(int ranks) {
    cpu_set_t processors;
    const bool known = sched_getaffinity(0, sizeof(processors), &processors) == 0;
    return known && CPU_COUNT(&processors) >= ranks ? SPIN : SPIN_WHEN_CROWDED;
}

size_t bytes_of(const Call &call, uint64_t elements) { return size_t(elements) * element_size(call.dtype); }

// The sum of the first `count` values.
uint64_t sum(const std::vector<uint64_t> &values, int count) {
    return std::accumulate(values.begin(), values.begin() + count, uint64_t(0));
}

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// second: another output, written without reading the source again; or null.
void copy(char *output, const char *source, size_t bytes, int threads, char *second = nullptr) {
    if (output == source) output = std::exchange(second, nullptr);
    if (!output) return;
    run_pieces(bytes, PIECE, threads, [&](size_t begin, size_t end) {
        const size_t length = end - begin;
        char *const also = second ? second + begin : nullptr;
        if (bytes >= STREAM_FROM) return isa().stream(output + begin, source + begin, length, also);
        std::memcpy(output + begin, source + begin, length);
        if (also) std::memcpy(also, source + begin, length);
    });
}

}  // namespace

Channel::Channel(int rank, int size)
    : rank_(rank),
      size_(size),
      own_(sizeof(Mailbox)),
      mine_(make_mailbox(own_, rank, size)),
      peers_(size_t(size)),
      spin_(spin_time(size)),
      blocks_(mine_, [this](int stream) { return consumed_by_others(stream); }) {}

void Channel::connect(const int64_t *processes, const int *descriptors) {
    for (int r = 0; r < size_; r++)
        if (r != rank_) peers_[size_t(r)].reset(new Peer(r, size_, processes[r], descriptors[r]));
}

int64_t Channel::start(const Request &request, int threads) {
    std::unique_lock<std::mutex> lock(mutex_);
    return or_fail([&] {
        check_usable();
        check_own(request);
        make_room(lock, request, threads);
        const int stream = request.call.stream();
        const uint64_t number = next_[stream];
        publish(request, number, threads);
        tickets_[stream][number % RING] = {request, PENDING};
        next_[stream]++;
        return int64_t(number * STREAMS + uint64_t(stream));
    });
}

void Channel::finish(int64_t ticket, int threads) {
    const int stream = int(ticket % STREAMS);
    const uint64_t number = uint64_t(ticket) / STREAMS;
    Request request;
    if (!claim(stream, number, request)) return;
    try {
        or_fail([&] {
            wait_for_all(request, number);
            collect(request, number, threads);
        });
    } catch (...) {
        settle(stream, number, false);
        throw;
    }
    settle(stream, number, true);
}

void Channel::abandon(int64_t ticket) {
    const int stream = int(ticket % STREAMS);
    const uint64_t number = uint64_t(ticket) / STREAMS;
    std::lock_guard<std::mutex> lock(mutex_);
    if (number > mine_.consumed[stream].load()) consume(stream, number);
}

void Channel::fail(const char *reason) {
    if (gave_up_.exchange(true)) return;
    std::strncpy(mine_.reason, reason, sizeof(mine_.reason) - 1);
    mine_.failed.store(1, std::memory_order_release);
    ring_others();
}

std::shared_ptr<Segment> Channel::lend(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    return blocks_.lend(bytes);
}

size_t Channel::bytes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return own_.reserved() + blocks_.bytes();
}

void Channel::leave(double linger) {
    mine_.leaving.store(1);
    ring_others();
    const auto deadline = Clock::now() + std::chrono::duration<double>(linger);
    while (!mine_.failed.load() && !all_read() && Clock::now() < deadline)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// ---- publishing ----

// A rank has to wait for the others here only if it is ahead of them by a whole ring of collectives.
void Channel::make_room(std::unique_lock<std::mutex> &lock, const Request &request, int threads) {
    const int stream = request.call.stream();
    const auto deadline = Clock::now() + std::chrono::duration<double>(request.timeout);
    for (;;) {
        complete_forgotten(stream, threads);
        if (next_[stream] - consumed_by_all(stream) <= RING) return;
        check_others();
        const uint64_t number = next_[stream];
        if (const Peer *gone = find_gone(stream, number - 1)) throw gone_error(request.call, number, *gone);
        if (Clock::now() >= deadline)
            throw std::runtime_error(text("waited ", request.timeout, " s to start ", place(stream, number), ", ",
                                          request.call.words(size_), ": the ranks have not finished those ", RING,
                                          " places before it"));
        lock.unlock();  // another thread of this rank may be about to finish one
        std::this_thread::sleep_for(std::chrono::duration<double>(LOOK_SECONDS));
        lock.lock();
    }
}

void Channel::publish(const Request &request, uint64_t number, int threads) {
    const int stream = request.call.stream();
    Post &post = mine_.posts[stream][number % RING];
    post.call = request.call;
    const size_t bytes = post.bytes = published_bytes(request);
    post.with_own = bytes > SMALL && is_in_block(request, number, post);
    if (bytes > SMALL && !post.with_own) {
        post.block = blocks_.acquire(bytes, stream, number);
        post.offset = 0;
    }
    char *const part = bytes > SMALL ? blocks_.data(post.block) : post.small;
    if (post.with_own)
        ;  // nothing to copy
    else if (request.call.op == ACCELZ_ALL_GATHER)
        copy_shard(request, bytes ? part : nullptr, threads);
    else if (request.call.op == ACCELZ_ALL_TO_ALL)
        copy_parcels(request, bytes ? part : nullptr, threads);
    else if (bytes)
        copy_part(request, part, threads);
    post.number.store(number, std::memory_order_release);
    mine_.posted[stream].store(number, std::memory_order_release);
    ring_others();
}

// Whether the whole input is in a block that was lent, from which others can read it: then the post says where.
bool Channel::is_in_block(const Request &request, uint64_t number, Post &post) {
    const Call &call = request.call;
    return call.op == ACCELZ_REDUCE_SCATTER && blocks_.find_lent(request.input, call.bytes() * size_t(size_),
                                                                 call.stream(), number, post.block, post.offset);
}

// The bytes this rank publishes: without its own slice or parcel.
size_t Channel::published_bytes(const Request &request) const {
    const Call &call = request.call;
    if (size_ == 1 || call.common || (call.op == ACCELZ_BROADCAST && call.source != rank_)) return 0;
    if (call.op == ACCELZ_ALL_TO_ALL)
        return head_bytes() + bytes_of(call, sum(request.sent, size_) - request.sent[size_t(rank_)]);
    return call.bytes() * (call.op == ACCELZ_REDUCE_SCATTER ? size_t(size_ - 1) : 1);
}

// Before the parcels a block holds the number of elements for each rank, padded to whole cache lines.
size_t Channel::head_bytes() const { return (sizeof(uint64_t) * size_t(size_) + 63) / 64 * 64; }

// Copies the parcels for the others to `to`, unless that is null, and this rank's own to its place in the output.
void Channel::copy_parcels(const Request &request, char *to, int threads) const {
    const Call &call = request.call;
    const size_t before = bytes_of(call, sum(request.sent, rank_));
    const size_t own = bytes_of(call, request.sent[size_t(rank_)]);
    const size_t after = bytes_of(call, sum(request.sent, size_)) - before - own;
    if (to) {
        std::memcpy(to, request.sent.data(), sizeof(uint64_t) * size_t(size_));
        copy(to + head_bytes(), request.input, before, threads);
        copy(to + head_bytes() + before, request.input + before + own, after, threads);
    }
    copy(request.output + bytes_of(call, sum(request.received, rank_)), request.input + before, own, threads);
}

// Copies the shard to `to`, unless that is null, and to its own place in the output, reading it once.
void Channel::copy_shard(const Request &request, char *to, int threads) const {
    if (request.call.common) return;
    const size_t bytes = request.call.bytes();
    char *const own = request.output + bytes * size_t(rank_);
    copy(own, request.input, bytes, threads, to);
}

// Copies what others need: of a reduce-scatter, all but this rank's own slice.
void Channel::copy_part(const Request &request, char *to, int threads) const {
    const size_t bytes = request.call.bytes();
    if (request.call.op != ACCELZ_REDUCE_SCATTER) return copy(to, request.input, bytes, threads);
    const size_t before = bytes * size_t(rank_), after = bytes * size_t(size_ - 1 - rank_);
    copy(to, request.input, before, threads);
    copy(to + before, request.input + before + bytes, after, threads);
}

// ---- waiting ----

void Channel::wait_for_all(const Request &request, uint64_t number) {
    const Call &call = request.call;
    const auto began = Clock::now();
    const auto deadline = began + std::chrono::duration<double>(request.timeout);
    for (bool patient = false;;) {
        const uint32_t bell = mine_.bell.load();
        // Look for ranks that are gone before looking for posts: a rank may post and then go in between.
        const Peer *gone = patient ? find_gone(call.stream(), number) : nullptr;
        if (all_posted(call, number)) return;
        check_others();
        if (gone && !gone->post(call.stream(), number)) throw gone_error(call, number, *gone);
        const auto now = Clock::now();
        if (now >= deadline) throw timeout_error(request, number);
        patient = now - began > spin_;
        if (patient)
            sleep_on_bell(mine_, bell, LOOK_SECONDS);
        else if (now - began < PAUSE)
            pause();
        else
            sched_yield();  // the rank that is waited for may need this very processor
    }
}

bool Channel::all_posted(const Call &call, uint64_t number) const {
    bool all = true;
    for (const auto &peer : peers_) {
        if (!peer) continue;
        const Post *post = peer->post(call.stream(), number);
        all = all && post;
        if (post && !(post->call == call))
            throw std::runtime_error(text("ranks issued different collectives: ", place(call.stream(), number), " is ",
                                          call.words(size_), " on rank ", rank_, ", but ", post->call.words(size_),
                                          " on rank ", peer->mailbox().rank,
                                          ". All ranks must issue the same collectives in the same order"));
    }
    return all;
}

void Channel::check_others() const {
    for (const auto &peer : peers_)
        if (peer && peer->failed())
            throw GaveUp(text("rank ", peer->mailbox().rank, " gave up: ", peer->mailbox().reason));
}

Peer *Channel::find_gone(int stream, uint64_t number) const {
    for (const auto &peer : peers_)
        if (peer && !peer->post(stream, number) && peer->gone()) return peer.get();
    return nullptr;
}

std::runtime_error Channel::gone_error(const Call &call, uint64_t number, const Peer &peer) const {
    return std::runtime_error(text("rank ", peer.mailbox().rank, " (process ", peer.process(),
                                   ") ended without giving its part of ", place(call.stream(), number), ", ",
                                   call.words(size_), "; its last was ", place(call.stream(), peer.posted(call.stream()))));
}

std::runtime_error Channel::timeout_error(const Request &request, uint64_t number) const {
    const int stream = request.call.stream();
    std::string late;
    for (const auto &peer : peers_)
        if (peer && !peer->post(stream, number))
            late += text("; rank ", peer->mailbox().rank, " did not arrive, its last was ",
                         place(stream, peer->posted(stream)));
    return std::runtime_error(text("rank ", rank_, " waited ", request.timeout, " s in ", place(stream, number), ", ",
                                   request.call.words(size_), late));
}

// ---- reading ----

void Channel::collect(const Request &request, uint64_t number, int threads) {
    const Call &call = request.call;
    if (call.op == ACCELZ_ALL_TO_ALL) return collect_parcels(request, number, threads);
    if (call.count == 0 || call.common) return;
    if (call.op == ACCELZ_ALL_GATHER) return collect_shards(request, number, threads);
    if (call.op != ACCELZ_BROADCAST) return collect_sum(request, number, threads);
    if (call.source == rank_) return;
    copy(request.output, data_of(call.source, call.stream(), number), call.bytes(), threads);
}

void Channel::collect_shards(const Request &request, uint64_t number, int threads) {
    const size_t bytes = request.call.bytes();
    for (int r = 0; r < size_; r++) {
        if (r == rank_) continue;  // written when it was published
        copy(request.output + bytes * size_t(r), data_of(r, request.call.stream(), number), bytes, threads);
    }
}

void Channel::collect_parcels(const Request &request, uint64_t number, int threads) {
    const Call &call = request.call;
    std::vector<uint64_t> sent(static_cast<size_t>(size_));
    for (int r = 0; r < size_; r++) {
        if (r == rank_) continue;  // written when it was published
        const char *const block = data_of(r, call.stream(), number);
        std::memcpy(sent.data(), block, sizeof(uint64_t) * size_t(size_));
        const uint64_t expected = request.received[size_t(r)], came = sent[size_t(rank_)];
        if (came != expected)
            throw std::runtime_error(text(place(call.stream(), number), ", ", call.words(size_), ": rank ", r, " sends ",
                                          came, " elements to rank ", rank_, ", which expects ", expected));
        sent[size_t(r)] = 0;  // rank r has left out its own parcel
        const char *const parcel = block + head_bytes() + bytes_of(call, sum(sent, rank_));
        copy(request.output + bytes_of(call, sum(request.received, r)), parcel, bytes_of(call, came), threads);
    }
}

void Channel::collect_sum(const Request &request, uint64_t number, int threads) {
    const Call &call = request.call;
    std::vector<const char *> parts;
    for (int r = 0; r < size_; r++) {
        const char *part = r == rank_ ? request.input : data_of(r, call.stream(), number);
        // Rank r has left out its own slice from its block, unless its caller has filled it.
        const bool without = r < rank_ && !peers_[size_t(r)]->post(call.stream(), number)->with_own;
        const int slice = call.op == ACCELZ_ALL_REDUCE ? 0 : rank_ - int(without);
        parts.push_back(part + call.bytes() * size_t(slice));
    }
    if (size_ == 1) return copy(request.output, parts[0], call.bytes(), threads);
    reduce(request.output, parts, call.dtype, call.reduce, call.count, threads);
}

const char *Channel::data_of(int rank, int stream, uint64_t number) {
    Peer &peer = *peers_[size_t(rank)];
    const Post &post = *peer.post(stream, number);
    try {
        return peer.data(post);
    } catch (const std::runtime_error &) {
        if (peer.gone()) throw gone_error(post.call, number, peer);
        throw;
    }
}

// ---- bookkeeping ----

// Whether the caller has to finish a collective: one of several threads does, and the others return after it has.
bool Channel::claim(int stream, uint64_t number, Request &request) {
    std::unique_lock<std::mutex> lock(mutex_);
    Ticket &mine = tickets_[stream][number % RING];
    // Check `consumed` first: another collective may have taken the place in the ring meanwhile.
    const auto complete = [&] { return number <= mine_.consumed[stream].load() || mine.state == DONE; };
    const bool taken = !complete() && mine.state == FINISHING;
    settled_.wait(lock, [&] { return complete() || mine.state != FINISHING; });
    if (complete()) return false;
    if (taken) check_usable();  // the other thread has failed
    mine.state = FINISHING;
    request = mine.request;
    return true;
}

void Channel::settle(int stream, uint64_t number, bool complete) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (complete)
        consume(stream, number);
    else
        tickets_[stream][number % RING].state = PENDING;
    settled_.notify_all();
}

void Channel::consume(int stream, uint64_t number) {
    tickets_[stream][number % RING].state = DONE;
    uint64_t done = mine_.consumed[stream].load();
    while (done + 1 < next_[stream] && tickets_[stream][(done + 1) % RING].state == DONE) done++;
    mine_.consumed[stream].store(done, std::memory_order_release);
}

// A handle that is kept but never waited for would keep the blocks of all ranks in use. So when many collectives are
// in progress, the oldest are completed here, as far as that is possible without waiting.
void Channel::complete_forgotten(int stream, int threads) {
    while (next_[stream] - mine_.consumed[stream].load() > MANY) {
        const uint64_t oldest = mine_.consumed[stream].load() + 1;
        const Ticket &ticket = tickets_[stream][oldest % RING];
        if (ticket.state != PENDING || !all_posted(ticket.request.call, oldest)) return;
        collect(ticket.request, oldest, threads);
        consume(stream, oldest);
    }
}

uint64_t Channel::consumed_by_others(int stream) const {
    uint64_t least = UINT64_MAX;
    for (const auto &peer : peers_)
        if (peer) least = std::min(least, peer->consumed(stream));
    return least;
}

uint64_t Channel::consumed_by_all(int stream) const {
    return std::min(consumed_by_others(stream), mine_.consumed[stream].load());
}

bool Channel::all_read() const {
    for (const auto &peer : peers_) {
        if (!peer || peer->failed() || peer->gone()) continue;
        for (int stream = 0; stream < STREAMS; stream++)
            if (peer->consumed(stream) + 1 < next_[stream]) return false;
    }
    return true;
}

void Channel::ring_others() {
    for (const auto &peer : peers_)
        if (peer) ring(peer->mailbox());
}

void Channel::check_own(const Request &request) const {
    if (request.call.op != ACCELZ_ALL_TO_ALL) return;
    if (request.sent.size() != size_t(size_) || request.received.size() != size_t(size_))
        throw std::runtime_error("an all_to_all must be started with accelz_start_all_to_all");
    const uint64_t sent = request.sent[size_t(rank_)], received = request.received[size_t(rank_)];
    if (sent != received)
        throw std::runtime_error(text(request.call.words(size_), ": rank ", rank_, " sends itself ", sent,
                                      " elements but expects ", received));
}

void Channel::check_usable() const {
    if (mine_.failed.load())
        throw std::runtime_error(
            text("no collective is possible after an earlier failure; start a new job: ", mine_.reason));
    check_others();
}

// Run body; if it fails, tell the other ranks that this one has given up, and why.
template <class Body>
auto Channel::or_fail(Body &&body) -> decltype(body()) {
    try {
        return body();
    } catch (const GaveUp &) {
        throw;
    } catch (const std::exception &error) {
        fail(error.what());
        throw;
    }
}

}  // namespace accelz

struct accelz_channel {
    accelz::Channel channel;
};

namespace {

// The layout of DLPack's DLManagedTensor, and behind it what the deleter needs.
struct Lent {
    void *data;
    struct {
        int32_t type = 1, id = 0;  // a CPU
    } device;
    int32_t dimensions = 1;
    struct {
        uint8_t code = 1, bits = 8;  // unsigned integers
        uint16_t lanes = 1;
    } dtype;
    int64_t *shape = &length;
    int64_t *strides = nullptr;  // contiguous
    uint64_t offset = 0;
    void *context = nullptr;
    void (*deleter)(Lent *) = [](Lent *self) {
        if (getpid() != self->process) return;  // a forked child may have memory of its own at that address
        self->segment->lent.store(false, std::memory_order_release);
        delete self;
    };

    int64_t length;
    std::shared_ptr<accelz::Segment> segment;
    pid_t process = getpid();

    Lent(std::shared_ptr<accelz::Segment> memory, size_t bytes)
        : data(memory->data()), length(int64_t(bytes)), segment(std::move(memory)) {}
};

static_assert(offsetof(Lent, deleter) == 56, "this is not DLManagedTensor");

}  // namespace

extern "C" {

accelz_channel *accelz_channel_create(int rank, int size) {
    return accelz::guarded<accelz_channel *>(nullptr, [&] { return new accelz_channel{{rank, size}}; });
}

int accelz_channel_descriptor(const accelz_channel *channel) { return channel->channel.descriptor(); }

int accelz_channel_connect(accelz_channel *channel, const int64_t *processes, const int *descriptors) {
    return accelz::guarded(-1, [&] { return channel->channel.connect(processes, descriptors), 0; });
}

int64_t accelz_start(accelz_channel *channel, int op, int reduce, int dtype, size_t count, int source, void *output,
                     const void *input, double timeout_seconds, int threads) {
    accelz::Call call;
    call.count = count;
    call.op = uint8_t(op);
    call.dtype = uint8_t(dtype);
    if (call.stream() == 1) call.reduce = uint8_t(reduce);
    if (op == ACCELZ_BROADCAST) call.source = source;
    call.common = op == ACCELZ_ALL_GATHER && !input && count;
    const accelz::Request request{call, static_cast<char *>(output), static_cast<const char *>(input),
                                  timeout_seconds, {}, {}};
    return accelz::guarded<int64_t>(-1, [&] { return channel->channel.start(request, threads); });
}

int64_t accelz_start_all_to_all(accelz_channel *channel, int dtype, void *output, const uint64_t *received,
                                const void *input, const uint64_t *sent, double timeout_seconds, int threads) {
    const size_t size = size_t(channel->channel.size());
    accelz::Call call;
    call.op = ACCELZ_ALL_TO_ALL;
    call.dtype = uint8_t(dtype);
    return accelz::guarded<int64_t>(-1, [&] {
        const accelz::Request request{call,
                                      static_cast<char *>(output),
                                      static_cast<const char *>(input),
                                      timeout_seconds,
                                      {received, received + size},
                                      {sent, sent + size}};
        return channel->channel.start(request, threads);
    });
}

int accelz_finish(accelz_channel *channel, int64_t ticket, int threads) {
    return accelz::guarded(-1, [&] { return channel->channel.finish(ticket, threads), 0; });
}

void accelz_abandon(accelz_channel *channel, int64_t ticket) { channel->channel.abandon(ticket); }

void accelz_channel_fail(accelz_channel *channel, const char *reason) { channel->channel.fail(reason); }

void *accelz_lend(accelz_channel *channel, size_t bytes) {
    return accelz::guarded<void *>(nullptr, [&]() -> void * {
        auto segment = channel->channel.lend(bytes);
        return segment ? new Lent(std::move(segment), bytes) : nullptr;
    });
}

size_t accelz_channel_bytes(const accelz_channel *channel) { return channel->channel.bytes(); }

void accelz_channel_close(accelz_channel *channel, double linger_seconds) {
    channel->channel.leave(linger_seconds);
    delete channel;
}

}
