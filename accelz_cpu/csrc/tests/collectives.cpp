// Collectives between ranks that are threads of one process, which share mappings, so that the thread sanitizer
// sees both sides of everything that is published and read; and between processes, which may be killed.

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>

#include "accelz_cpu.h"
#include "check.h"

namespace {

// Where the ranks tell each other what to map.
struct Meeting {
    static constexpr int MOST = 8;
    std::atomic<int> arrived{0};
    std::atomic<int64_t> processes[MOST];
    std::atomic<int> descriptors[MOST];
};

accelz_channel *join(Meeting &meeting, int rank, int size) {
    accelz_channel *channel = accelz_channel_create(rank, size);
    CHECK(channel);
    meeting.processes[rank] = getpid();
    meeting.descriptors[rank] = accelz_channel_descriptor(channel);
    meeting.arrived++;
    while (meeting.arrived < size) std::this_thread::yield();
    int64_t processes[Meeting::MOST];
    int descriptors[Meeting::MOST];
    for (int r = 0; r < size; r++) processes[r] = meeting.processes[r], descriptors[r] = meeting.descriptors[r];
    CHECK(accelz_channel_connect(channel, processes, descriptors) == 0);
    return channel;
}

struct Rank {
    accelz_channel *channel;
    int rank, size;
    int threads = 1;
    double timeout = 60;

    int64_t start(int op, int dtype, size_t count, void *output, const void *input, int source = 0) const {
        const int64_t ticket =
            accelz_start(channel, op, ACCELZ_SUM, dtype, count, source, output, input, timeout, threads);
        CHECK(ticket >= 0);
        return ticket;
    }
    void finish(int64_t ticket) const {
        if (accelz_finish(channel, ticket, threads) == 0) return;
        std::fprintf(stderr, "%s\n", accelz_last_error());
        std::exit(1);
    }
};

void on_threads(int size, const std::function<void(const Rank &)> &body, int threads = 1) {
    Meeting meeting;
    std::vector<std::thread> ranks;
    for (int r = 0; r < size; r++)
        ranks.emplace_back([&, r] {
            accelz_channel *channel = join(meeting, r, size);
            body({channel, r, size, threads});
            accelz_channel_close(channel, 10);
        });
    for (std::thread &rank : ranks) rank.join();
}

// What the caller has of DLPack's DLManagedTensor.
struct LentMemory {
    void *data;
    char between[48];
    void (*give_back)(LentMemory *);
};

LentMemory *lend(accelz_channel *channel, size_t bytes) {
    return static_cast<LentMemory *>(accelz_lend(channel, bytes));
}

std::vector<float> pattern(size_t n, int rank) {
    std::vector<float> values(n);
    for (size_t i = 0; i < n; i++) values[i] = float((i + size_t(rank) * 3) % 11);
    return values;
}

float sum_at(size_t i, int size) {
    float total = 0;
    for (int r = 0; r < size; r++) total += float((i + size_t(r) * 3) % 11);
    return total;
}

void gather(const Rank &r, size_t n) {
    const std::vector<float> shard = pattern(n, r.rank);
    std::vector<float> whole(n * size_t(r.size), -1);
    r.finish(r.start(ACCELZ_ALL_GATHER, ACCELZ_FLOAT32, n, whole.data(), shard.data()));
    for (int q = 0; q < r.size; q++)
        for (size_t i = 0; i < n; i++) CHECK(whole[size_t(q) * n + i] == float((i + size_t(q) * 3) % 11));
}

void scatter(const Rank &r, size_t n) {
    const std::vector<float> full = pattern(n * size_t(r.size), r.rank);
    std::vector<float> mine(n, -1);
    r.finish(r.start(ACCELZ_REDUCE_SCATTER, ACCELZ_FLOAT32, n, mine.data(), full.data()));
    for (size_t i = 0; i < n; i++) CHECK(mine[i] == sum_at(size_t(r.rank) * n + i, r.size));
}

void reduce(const Rank &r, size_t n) {
    std::vector<float> values = pattern(n, r.rank);
    r.finish(r.start(ACCELZ_ALL_REDUCE, ACCELZ_FLOAT32, n, values.data(), values.data()));
    for (size_t i = 0; i < n; i++) CHECK(values[i] == sum_at(i, r.size));
}

// How many elements go from one rank to another; for some it is 0.
uint64_t parcel(size_t n, int from, int to) { return uint64_t(n) * uint64_t((from + 2 * to) % 3); }

void exchange(const Rank &r, size_t n) {
    std::vector<uint64_t> sent, received;
    std::vector<float> mine, expected;
    for (int q = 0; q < r.size; q++) {
        sent.push_back(parcel(n, r.rank, q));
        received.push_back(parcel(n, q, r.rank));
        for (uint64_t i = 0; i < sent.back(); i++) mine.push_back(float(100 * r.rank + 10 * q + int(i % 7)));
        for (uint64_t i = 0; i < received.back(); i++) expected.push_back(float(100 * q + 10 * r.rank + int(i % 7)));
    }
    std::vector<float> output(expected.size(), -1);
    const int64_t ticket = accelz_start_all_to_all(r.channel, ACCELZ_FLOAT32, output.data(), received.data(),
                                                   mine.data(), sent.data(), r.timeout, r.threads);
    CHECK(ticket >= 0);
    r.finish(ticket);
    CHECK(output == expected);
}

void broadcast(const Rank &r, size_t n, int source) {
    std::vector<float> values = pattern(n, r.rank);
    const std::vector<float> expected = pattern(n, source);
    r.finish(r.start(ACCELZ_BROADCAST, ACCELZ_FLOAT32, n, values.data(), values.data(), source));
    CHECK(values == expected);
}

}  // namespace

TEST(all_operations_many_times) {
    for (int size : {1, 2, 3, 4})
        on_threads(size, [](const Rank &r) {
            for (int round = 0; round < 60; round++)
                for (size_t n : {size_t(0), size_t(1), size_t(112), size_t(113), size_t(5000) + size_t(round) * 37}) {
                    gather(r, n);
                    scatter(r, n);
                    reduce(r, n);
                    exchange(r, n);
                    broadcast(r, n, round % r.size);
                }
        });
}

TEST(large_messages_on_several_threads) {
    on_threads(
        2,
        [](const Rank &r) {
            // The last two are long enough to bypass the cache; in the last one, ranks' places differ in alignment.
            for (size_t n : {size_t(300'000), size_t(1'200'000), size_t(1'100'001)}) {
                gather(r, n);
                scatter(r, n);
                reduce(r, n);
                exchange(r, n);
            }
        },
        2);
}

TEST(many_under_way_finished_in_any_order) {
    on_threads(3, [](const Rank &r) {
        constexpr size_t N = 700, COUNT = 300;  // more than a ring holds
        std::vector<std::vector<float>> wholes(COUNT, std::vector<float>(N * 3));
        const std::vector<float> shard = pattern(N, r.rank);
        std::vector<int64_t> tickets;
        for (std::vector<float> &whole : wholes) {
            if (r.rank == 1 && tickets.size() == 200) std::this_thread::sleep_for(std::chrono::milliseconds(50));
            tickets.push_back(r.start(ACCELZ_ALL_GATHER, ACCELZ_FLOAT32, N, whole.data(), shard.data()));
        }
        for (size_t k = COUNT; k-- > 0;) r.finish(tickets[k]);
        for (const std::vector<float> &whole : wholes)
            for (size_t q = 0; q < 3; q++) CHECK(whole[q * N + 5] == float((5 + q * 3) % 11));
        CHECK(accelz_channel_bytes(r.channel) < size_t(16) << 20);
    });
}

TEST(abandoned_collectives_hold_nothing_up) {
    on_threads(2, [](const Rank &r) {
        std::vector<float> whole(2000), shard(1000, 1);
        for (int k = 0; k < 500; k++) {
            const int64_t ticket = r.start(ACCELZ_ALL_GATHER, ACCELZ_FLOAT32, 1000, whole.data(), shard.data());
            if (k % 2 == r.rank) r.finish(ticket);
            else accelz_abandon(r.channel, ticket);
        }
        gather(r, 1000);
        CHECK(accelz_channel_bytes(r.channel) < size_t(16) << 20);
    });
}

TEST(two_streams_do_not_wait_for_each_other) {
    on_threads(2, [](const Rank &r) {
        std::vector<float> whole(2000), shard(1000, 1), total(1000, 1);
        for (int k = 0; k < 100; k++) {
            const auto move = [&] {
                r.finish(r.start(ACCELZ_ALL_GATHER, ACCELZ_FLOAT32, 1000, whole.data(), shard.data()));
            };
            const int64_t first = r.rank == 0 ? r.start(ACCELZ_ALL_REDUCE, ACCELZ_FLOAT32, 1000, total.data(), total.data()) : -1;
            move();
            r.finish(first >= 0 ? first : r.start(ACCELZ_ALL_REDUCE, ACCELZ_FLOAT32, 1000, total.data(), total.data()));
            total.assign(1000, 1);
        }
    });
}

// Some ranks' inputs are in lent memory and others' are not. It is returned while others may still read it.
TEST(lent_memory_is_read_in_place) {
    on_threads(3, [](const Rank &r) {
        std::vector<int64_t> tickets;
        std::vector<std::vector<float>> inputs, outputs;
        for (int round = 0; round < 400; round++) {
            const size_t n = 500 + size_t(round % 5) * 3000;
            const std::vector<float> full = pattern(n * 3, r.rank);
            outputs.emplace_back(n, -1);
            LentMemory *memory = nullptr;
            if ((round + r.rank) % 3) CHECK(memory = lend(r.channel, (n * 3 + 5) * sizeof(float)));
            const size_t offset = memory ? size_t(round % 2) * 5 : 0;  // bytes around the input do not matter
            inputs.push_back(memory ? std::vector<float>() : full);
            float *input = memory ? static_cast<float *>(memory->data) + offset : inputs.back().data();
            std::memcpy(input, full.data(), full.size() * sizeof(float));
            const int64_t ticket = r.start(ACCELZ_REDUCE_SCATTER, ACCELZ_FLOAT32, n, outputs.back().data(), input);
            r.finish(ticket);
            for (size_t i = 0; i < n; i++) CHECK(outputs.back()[i] == sum_at(size_t(r.rank) * n + i, 3));
            if (memory) memory->give_back(memory);
        }
        CHECK(accelz_channel_bytes(r.channel) < size_t(4) << 20);
    });
}

TEST(lent_memory_has_an_end_and_outlives_its_channel) {
    accelz_channel *channel = accelz_channel_create(0, 1);
    std::vector<LentMemory *> lent;
    while (LentMemory *memory = lend(channel, 1000)) lent.push_back(memory);
    CHECK(lent.size() == 256);
    lent.back()->give_back(lent.back());
    CHECK(lent.back() = lend(channel, 2000));
    CHECK(!lend(channel, 1));
    accelz_channel_close(channel, 1);
    for (LentMemory *memory : lent) {
        std::memset(memory->data, 1, 1000);
        memory->give_back(memory);
    }
}

TEST(common_memory_is_published_by_coming) {
    std::vector<float> common(3 * 500);
    on_threads(3, [&](const Rank &r) {
        float *mine = common.data() + r.rank * 500;
        for (int round = 0; round < 100; round++) {
            for (int i = 0; i < 500; i++) mine[i] = float(round);
            r.finish(r.start(ACCELZ_ALL_GATHER, ACCELZ_FLOAT32, 500, common.data(), nullptr));
            for (const float value : common) CHECK(value == float(round));
            float token = 0;  // the fence before the next change
            r.finish(r.start(ACCELZ_ALL_REDUCE, ACCELZ_FLOAT32, 1, &token, &token));
        }
    });
}

TEST(two_threads_of_a_rank) {
    on_threads(2, [](const Rank &r) {
        std::thread other([&] {
            for (int k = 0; k < 300; k++) reduce(r, 900);
        });
        for (int k = 0; k < 300; k++) gather(r, 900);
        other.join();
    });
}

TEST(two_threads_finish_the_same_collective) {
    on_threads(2, [](const Rank &r) {
        for (int round = 0; round < 50; round++) {
            std::vector<float> values = pattern(100'000, r.rank);
            const int64_t ticket = r.start(ACCELZ_ALL_REDUCE, ACCELZ_FLOAT32, values.size(), values.data(), values.data());
            const auto check = [&] {
                r.finish(ticket);
                for (size_t i = 0; i < values.size(); i++) CHECK(values[i] == sum_at(i, r.size));
            };
            std::thread other(check);
            check();
            other.join();
        }
    });
}

TEST(all_that_wait_for_a_collective_learn_that_it_failed) {
    on_threads(2, [](const Rank &r) {
        reduce(r, 1);  // everyone is connected
        if (r.rank == 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(300));
            return accelz_channel_fail(r.channel, "the network is gone");
        }
        float value = 1;
        const int64_t ticket = r.start(ACCELZ_ALL_REDUCE, ACCELZ_FLOAT32, 1, &value, &value);
        const auto check = [&] {
            CHECK(accelz_finish(r.channel, ticket, 1) < 0);
            CHECK(std::string(accelz_last_error()).find("the network is gone") != std::string::npos);
        };
        std::thread other(check);
        check();
        other.join();
    });
}

TEST(different_calls_are_named_on_both_sides) {
    std::atomic<int> told{0};
    on_threads(2, [&](const Rank &r) {
        std::vector<float> values(64, 1), whole(128);
        if (r.rank == 0) {
            const int64_t ticket = r.start(ACCELZ_ALL_GATHER, ACCELZ_FLOAT32, 64, whole.data(), values.data());
            CHECK(accelz_finish(r.channel, ticket, 1) < 0);
        } else {
            const int64_t ticket = r.start(ACCELZ_BROADCAST, ACCELZ_FLOAT32, 8, values.data(), values.data());
            CHECK(accelz_finish(r.channel, ticket, 1) < 0);
        }
        const std::string error = accelz_last_error();
        CHECK(error.find("all_gather of 512 bytes (float32)") != std::string::npos);
        CHECK(error.find("broadcast of 32 bytes (float32, from rank 0)") != std::string::npos);
        told++;
    });
    CHECK(told == 2);
}

TEST(an_exchange_that_ranks_see_differently) {
    for (const uint64_t expected : {uint64_t(63), uint64_t(65)})
        on_threads(2, [&](const Rank &r) {
            std::vector<float> output(1000, -1), mine(1000, 1);
            const uint64_t other = r.rank == 0 ? expected : 64;
            const uint64_t counts[] = {r.rank == 0 ? 3 : other, r.rank == 0 ? other : 3}, even[] = {3, 64};
            const uint64_t *const sent = r.rank == 0 ? even : counts;
            const int64_t ticket =
                accelz_start_all_to_all(r.channel, ACCELZ_FLOAT32, output.data(), counts, mine.data(), sent, 30, 1);
            CHECK(ticket < 0 || accelz_finish(r.channel, ticket, 1) < 0 || r.rank == 1);
            if (r.rank == 0)
                CHECK(std::string(accelz_last_error()).find("rank 1 sends 64 elements to rank 0, which expects ") !=
                      std::string::npos);
            for (size_t i = 67; i < output.size(); i++) CHECK(output[i] == -1);
            const uint64_t own[] = {1, 2};
            CHECK(accelz_start_all_to_all(r.channel, ACCELZ_FLOAT32, output.data(), own, mine.data(), counts, 1, 1) < 0);
        });
}

TEST(a_rank_that_stays_away) {
    on_threads(3, [](const Rank &r) {
        if (r.rank == 2) {
            std::this_thread::sleep_for(std::chrono::milliseconds(800));
            return;
        }
        float value = 1;
        Rank hasty = r;
        hasty.timeout = 0.3;
        const int64_t ticket = hasty.start(ACCELZ_ALL_REDUCE, ACCELZ_FLOAT32, 1, &value, &value);
        CHECK(accelz_finish(r.channel, ticket, 1) < 0);
        const std::string error = accelz_last_error();
        CHECK(error.find("rank 2 did not arrive") != std::string::npos);
        CHECK(accelz_start(r.channel, ACCELZ_ALL_REDUCE, 0, 0, 1, 0, &value, &value, 1, 1) < 0);
    });
}

TEST(a_rank_that_gives_up_says_why) {
    on_threads(3, [](const Rank &r) {
        reduce(r, 1);  // everyone is connected
        float value = 1;
        if (r.rank == 1) return accelz_channel_fail(r.channel, "the network is gone");
        const int64_t ticket = accelz_start(r.channel, ACCELZ_ALL_REDUCE, 0, 0, 1, 0, &value, &value, 30, 1);
        CHECK(ticket < 0 || accelz_finish(r.channel, ticket, 1) < 0);
        CHECK(std::string(accelz_last_error()).find("rank 1 gave up: the network is gone") != std::string::npos);
    });
}

#if !defined(__SANITIZE_THREAD__)
TEST(a_forked_child_has_no_descriptor_of_a_group) {
    accelz_channel *channel = accelz_channel_create(0, 1);
    const int descriptor = accelz_channel_descriptor(channel);
    const pid_t child = fork();
    if (child == 0) _exit(fcntl(descriptor, F_GETFD) == -1 ? 0 : 1);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    CHECK(fcntl(descriptor, F_GETFD) != -1);
    accelz_channel_close(channel, 10);
    CHECK(fcntl(descriptor, F_GETFD) == -1);
}

TEST(a_killed_process_is_noticed_at_once) {
    int ready[2];
    CHECK(pipe(ready) == 0);
    int back[2];
    CHECK(pipe(back) == 0);
    const pid_t parent = getpid();
    accelz_channel *channel = accelz_channel_create(0, 2);
    const int descriptor = accelz_channel_descriptor(channel);
    const pid_t child = fork();
    const auto reduce_once = [](accelz_channel *mine) {
        float value = 1;
        const int64_t ticket = accelz_start(mine, ACCELZ_ALL_REDUCE, 0, 0, 1, 0, &value, &value, 30, 1);
        return ticket < 0 ? -1 : accelz_finish(mine, ticket, 1);
    };
    if (child == 0) {
        accelz_channel *mine = accelz_channel_create(1, 2);
        const int64_t processes[] = {parent, getpid()};
        const int descriptors[] = {descriptor, accelz_channel_descriptor(mine)};
        CHECK(write(ready[1], &descriptors[1], sizeof(int)) == sizeof(int));
        char go;
        CHECK(read(back[0], &go, 1) == 1);  // the parent has all it needs
        CHECK(accelz_channel_connect(mine, processes, descriptors) == 0);
        CHECK(reduce_once(mine) == 0);
        for (;;) pause();
    }
    int theirs = -1;
    CHECK(read(ready[0], &theirs, sizeof(int)) == sizeof(int));
    const int64_t processes[] = {parent, child};
    const int descriptors[] = {descriptor, theirs};
    CHECK(accelz_channel_connect(channel, processes, descriptors) == 0);
    CHECK(write(back[1], "g", 1) == 1);
    CHECK(reduce_once(channel) == 0);
    std::thread killer([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        kill(child, SIGKILL);  // and it stays a zombie until it is waited for below
    });
    const auto began = std::chrono::steady_clock::now();
    CHECK(reduce_once(channel) < 0);
    CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(5));
    CHECK(std::string(accelz_last_error()).find("rank 1 (process ") != std::string::npos);
    killer.join();
    CHECK(waitpid(child, nullptr, 0) == child);
    accelz_channel_close(channel, 10);
}
#endif
