#include "isa.h"

#include <atomic>
#include <cstring>
#include <initializer_list>

#include "accelz_cpu.h"

namespace accelz {

namespace baseline { extern const IsaKernels kernels; }
#ifdef ACCELZ_X86
namespace avx2 { extern const IsaKernels kernels; }
namespace avx512 { extern const IsaKernels kernels; }
#endif

namespace {

const IsaKernels *find(const char *name) {
#ifdef ACCELZ_X86
    __builtin_cpu_init();
    if (!std::strcmp(name, "avx512")) {
        const bool there = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        return there ? &avx512::kernels : nullptr;
    }
    if (!std::strcmp(name, "avx2"))  // every processor with AVX2 has F16C
        return __builtin_cpu_supports("avx2") ? &avx2::kernels : nullptr;
#endif
    return std::strcmp(name, "baseline") ? nullptr : &baseline::kernels;
}

const IsaKernels *best() {
    for (const char *name : {"avx512", "avx2"})
        if (const IsaKernels *found = find(name)) return found;
    return &baseline::kernels;
}

std::atomic<const IsaKernels *> &chosen() {
    static std::atomic<const IsaKernels *> choice{best()};
    return choice;
}

}  // namespace

const IsaKernels &isa() { return *chosen().load(std::memory_order_relaxed); }

size_t element_size(int dtype) {
    switch (dtype) {
        case ACCELZ_FLOAT64:
        case ACCELZ_INT64: return 8;
        case ACCELZ_FLOAT32:
        case ACCELZ_INT32: return 4;
        case ACCELZ_UINT8:
        case ACCELZ_INT8:
        case ACCELZ_FLOAT8_E4M3: return 1;
        default: return 2;
    }
}

}  // namespace accelz

extern "C" {

int accelz_abi(void) { return ACCELZ_ABI; }

const char *accelz_isa(void) { return accelz::isa().name; }

int accelz_use_isa(const char *name) {
    const accelz::IsaKernels *found = accelz::find(name);
    if (!found) return -1;
    accelz::chosen().store(found);
    return 0;
}

}
