#include "call.h"

#include "accelz_cpu.h"
#include "errors.h"
#include "isa.h"

namespace accelz {
namespace {

constexpr const char *OPERATIONS[] = {"all_gather", "broadcast", "reduce_scatter", "all_reduce", "all_to_all"};
constexpr const char *REDUCTIONS[] = {"sum", "max", "min"};
constexpr const char *DTYPES[] = {"float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8"};
constexpr const char *SEQUENCES[STREAMS] = {"movement", "reduction"};

}  // namespace

size_t Call::bytes() const { return count * element_size(dtype); }

int Call::stream() const { return op == ACCELZ_REDUCE_SCATTER || op == ACCELZ_ALL_REDUCE; }

bool Call::operator==(const Call &other) const {
    return count == other.count && source == other.source && op == other.op && reduce == other.reduce &&
           dtype == other.dtype && common == other.common;
}

std::string Call::words(int ranks) const {
    if (op == ACCELZ_ALL_TO_ALL) return text(OPERATIONS[op], " (", DTYPES[dtype], ")");
    const bool sharded = op == ACCELZ_ALL_GATHER || op == ACCELZ_REDUCE_SCATTER;
    std::string words = text(OPERATIONS[op], " of ", bytes() * size_t(sharded ? ranks : 1), " bytes (", DTYPES[dtype]);
    if (stream() == 1) words += text(", ", REDUCTIONS[reduce]);
    if (op == ACCELZ_BROADCAST) words += text(", from rank ", source);
    if (common) words += ", in common memory";
    return words + ")";
}

std::string place(int stream, uint64_t number) { return text(SEQUENCES[stream], " ", number); }

}  // namespace accelz
