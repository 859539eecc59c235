#include "reduce.h"

#include "accelz_cpu.h"
#include "isa.h"
#include "pool.h"

namespace accelz {
namespace {

constexpr size_t PIECE = size_t(1) << 18;  // bytes that a thread works on at a time

}  // namespace

void reduce(char *output, const std::vector<const char *> &parts, int dtype, int op, size_t count, int threads) {
    const size_t element = element_size(dtype);
    run_pieces(count, PIECE / element, threads, [&](size_t begin, size_t end) {
        std::vector<const void *> from;
        for (const char *part : parts) from.push_back(part + begin * element);
        isa().reduce(output + begin * element, from.data(), int(parts.size()), dtype, op, end - begin);
    });
}

}  // namespace accelz

extern "C" void accelz_reduce(void *output, const void *rows, int count, int dtype, int op, size_t numel,
                              int threads) {
    const size_t bytes = numel * accelz::element_size(dtype);
    std::vector<const char *> parts;
    for (int row = 0; row < count; row++) parts.push_back(static_cast<const char *>(rows) + size_t(row) * bytes);
    accelz::reduce(static_cast<char *>(output), parts, dtype, op, numel, threads);
}
