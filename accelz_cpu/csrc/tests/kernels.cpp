// Kernels give the same bits on every instruction set and with any number of threads.

#include <unistd.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <random>
#include <thread>

#include "accelz_cpu.h"
#include "check.h"

namespace {

constexpr size_t N = 300'007;

struct State {
    std::vector<float> master, grad, average, square;
    std::vector<uint16_t> weights, narrow_grad, narrow_average, narrow_square;
    std::vector<uint8_t> average_codes = std::vector<uint8_t>(N), square_codes = std::vector<uint8_t>(N);
    std::vector<float> average_scales = std::vector<float>(N / ACCELZ_MOMENTS_BLOCK + 1, 0.3f);
    std::vector<float> square_scales = std::vector<float>(N / ACCELZ_MOMENTS_BLOCK + 1, 0.03f);
    std::vector<uint16_t> upper;     // of split masters
    std::vector<int16_t> remainder;  // and what these lack

    // The same values every time, which take longer to draw than all that is tested takes.
    State() : State(drawn()) {}

    static const State &drawn() {
        static const State once(7);
        return once;
    }

    explicit State(unsigned seed) : master(N), grad(N), average(N), square(N), weights(N), narrow_grad(N),
                                    narrow_average(N), narrow_square(N), upper(N), remainder(N) {
        std::mt19937 generator(seed);
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < N; i++) {
            master[i] = normal(generator);
            grad[i] = normal(generator);
            average[i] = 0.1f * normal(generator);
            square[i] = std::fabs(0.01f * normal(generator));
            std::memcpy(&narrow_average[i], reinterpret_cast<const char *>(&average[i]) + 2, 2);
            std::memcpy(&narrow_square[i], reinterpret_cast<const char *>(&square[i]) + 2, 2);
            std::memcpy(&upper[i], reinterpret_cast<const char *>(&master[i]) + 2, 2);
            remainder[i] = int16_t(generator());
            average_codes[i] = square_codes[i] = uint8_t(generator());
        }
    }

    void step(int optimizer, int threads, int grad_dtype = ACCELZ_FLOAT32, int moments_dtype = ACCELZ_FLOAT32,
              bool stochastic = false, bool split = false) {
        const float number = 3;
        accelz_update u{};
        u.master = master.data();
        u.grad = grad.data();
        if (grad_dtype != ACCELZ_FLOAT32) {
            accelz_scale_cast(narrow_grad.data(), grad_dtype, grad.data(), ACCELZ_FLOAT32, nullptr, N, 1);
            u.grad = narrow_grad.data();
        }
        void *const kept[][2] = {{average.data(), square.data()},
                                 {narrow_average.data(), narrow_square.data()},
                                 {average_codes.data(), square_codes.data()}};
        const int form = moments_dtype == ACCELZ_FLOAT32 ? 0 : moments_dtype == ACCELZ_BFLOAT16 ? 1 : 2;
        std::copy(std::begin(kept[form]), std::end(kept[form]), u.moments);
        u.moments_dtype = moments_dtype;
        u.scales[0] = average_scales.data();
        u.scales[1] = square_scales.data();
        u.stochastic = stochastic;
        u.weights = weights.data();
        if (split) {
            u.master = nullptr;
            u.remainder = remainder.data();
            u.weights = upper.data();
        }
        u.step = &number;
        u.numel = N;
        u.grad_dtype = grad_dtype;
        u.weights_dtype = ACCELZ_BFLOAT16;
        u.lr = 1e-3;
        u.sign = 1;
        u.decay = 0.9999;
        // adamw's; what others make of them does not matter here
        const double constants[] = {0.9, 0.1, std::log(0.9), 0.999, 0.001, std::log(0.999), 1e-8};
        std::copy(std::begin(constants), std::end(constants), u.constants);
        accelz_step(optimizer, &u, threads);
    }

    bool operator==(const State &o) const {
        const auto same = [](const std::vector<float> &a, const std::vector<float> &b) {
            return !std::memcmp(a.data(), b.data(), N * sizeof(float));
        };
        return same(master, o.master) && same(average, o.average) && same(square, o.square) && weights == o.weights &&
               upper == o.upper && remainder == o.remainder &&
               narrow_average == o.narrow_average && narrow_square == o.narrow_square &&
               average_codes == o.average_codes && square_codes == o.square_codes &&
               average_scales == o.average_scales && square_scales == o.square_scales;
    }
};

template <class Body>
void on_every_isa(Body body) {
    const std::string before = accelz_isa();
    for (const char *name : {"baseline", "avx2", "avx512"})
        if (accelz_use_isa(name) == 0) body();
    CHECK(accelz_use_isa(before.c_str()) == 0);
}

}  // namespace

TEST(steps_are_the_same_on_every_isa_and_any_threads) {
    for (int optimizer = 0; accelz_optimizer(optimizer); optimizer++)
        for (int dtype : {ACCELZ_FLOAT32, ACCELZ_BFLOAT16, ACCELZ_FLOAT16}) {
            State expected;
            CHECK(accelz_use_isa("baseline") == 0);
            expected.step(optimizer, 1, dtype);
            CHECK(!(expected == State()));
            on_every_isa([&] {
                for (int threads : {1, 2, 5}) {
                    State state;
                    state.step(optimizer, threads, dtype);
                    CHECK(state == expected);
                }
            });
        }
}

TEST(steps_with_narrow_state_are_the_same_on_every_isa_and_any_threads) {
    struct Way {
        int moments_dtype;
        bool stochastic, split;
    };
    for (int optimizer = 0; accelz_optimizer(optimizer); optimizer++)
        for (const Way way : {Way{ACCELZ_BFLOAT16, false, false}, Way{ACCELZ_BFLOAT16, true, true},
                              Way{ACCELZ_UINT8, false, true}}) {
            State expected;
            CHECK(accelz_use_isa("baseline") == 0);
            expected.step(optimizer, 1, ACCELZ_BFLOAT16, way.moments_dtype, way.stochastic, way.split);
            CHECK(expected.average == State().average);
            CHECK((expected.remainder == State().remainder) == !way.split);
            CHECK((expected.master == State().master) == way.split);
            on_every_isa([&] {
                for (int threads : {1, 3}) {
                    State state;
                    state.step(optimizer, threads, ACCELZ_BFLOAT16, way.moments_dtype, way.stochastic, way.split);
                    CHECK(state == expected);
                }
            });
        }
}

TEST(conversions_are_the_same_on_every_isa) {
    std::vector<uint16_t> all(65536);
    for (size_t i = 0; i < all.size(); i++) all[i] = uint16_t(i);
    std::vector<float> values(1 << 20);
    for (size_t i = 0; i < values.size(); i++) {
        const uint32_t bits = uint32_t(i) * 4099u;
        std::memcpy(&values[i], &bits, 4);
    }
    for (int dtype : {ACCELZ_BFLOAT16, ACCELZ_FLOAT16}) {
        std::vector<float> wide(all.size()), expected_wide;
        std::vector<uint16_t> narrow(values.size()), expected_narrow;
        on_every_isa([&] {
            accelz_scale_cast(wide.data(), ACCELZ_FLOAT32, all.data(), dtype, nullptr, all.size(), 1);
            accelz_scale_cast(narrow.data(), dtype, values.data(), ACCELZ_FLOAT32, nullptr, values.size(), 1);
            if (expected_wide.empty()) expected_wide = wide, expected_narrow = narrow;
            CHECK(!std::memcmp(wide.data(), expected_wide.data(), wide.size() * sizeof(float)));
            CHECK(narrow == expected_narrow);
        });
    }
}

TEST(the_norm_is_the_same_on_every_isa_and_any_threads) {
    const State state;
    double expected = -1;
    on_every_isa([&] {
        for (int threads : {1, 3}) {
            const double got = accelz_sum_of_squares(state.grad.data(), ACCELZ_FLOAT32, N, threads);
            if (expected < 0) expected = got;
            CHECK(got == expected);
        }
    });
    CHECK(std::fabs(expected / double(N) - 1) < 0.02);
}

TEST(rows_are_added_in_order_and_rounded_once) {
    constexpr int ROWS = 3;
    std::vector<float> rows(ROWS * N), wide(N), output(N);
    for (size_t i = 0; i < rows.size(); i++) rows[i] = float((i * 7) % 1001) * (i < N ? 1e6f : 1e-3f);
    std::vector<uint16_t> narrow(ROWS * N), sum(N), expected_sum(N);
    accelz_scale_cast(narrow.data(), ACCELZ_BFLOAT16, rows.data(), ACCELZ_FLOAT32, nullptr, rows.size(), 1);
    accelz_scale_cast(rows.data(), ACCELZ_FLOAT32, narrow.data(), ACCELZ_BFLOAT16, nullptr, rows.size(), 1);
    for (size_t i = 0; i < N; i++) wide[i] = (rows[i] + rows[N + i]) + rows[2 * N + i];
    accelz_scale_cast(expected_sum.data(), ACCELZ_BFLOAT16, wide.data(), ACCELZ_FLOAT32, nullptr, N, 1);
    for (int threads : {1, 3}) {
        accelz_reduce(sum.data(), narrow.data(), ROWS, ACCELZ_BFLOAT16, ACCELZ_SUM, N, threads);
        CHECK(sum == expected_sum);
        accelz_reduce(output.data(), rows.data(), ROWS, ACCELZ_FLOAT32, ACCELZ_SUM, N, threads);
        CHECK(output == wide);
    }
}

TEST(several_threads_may_call_at_once) {
    State expected;
    expected.step(0, 1);
    std::vector<State> states(3);
    std::vector<std::thread> callers;
    for (State &state : states) callers.emplace_back([&state] { state.step(0, 3); });
    for (std::thread &caller : callers) caller.join();
    for (const State &state : states) CHECK(state == expected);
}

TEST(a_forked_child_has_threads_of_its_own) {
#if !defined(__SANITIZE_THREAD__)  // which does not support threads after a fork
    State expected;
    expected.step(0, 2);
    const pid_t child = fork();
    if (child == 0) {
        State state;
        state.step(0, 2);
        _exit(state == expected ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}
