// The description of a collective that all ranks must agree on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace accelz {

constexpr int STREAMS = 2;  // movements and reductions: two sequences that do not wait for each other

struct Call {
    uint64_t count = 0;  // elements, as in accelz_start; for an all-to-all each rank has its own
    int32_t source = 0;  // broadcasts only
    uint8_t op = 0, reduce = 0, dtype = 0;
    bool common = false;  // an all-gather in memory that all ranks have in common: nothing is copied

    size_t bytes() const;
    int stream() const;
    bool operator==(const Call &other) const;

    // "all_gather of 4096 bytes (float32)": bytes of the whole buffer at this many ranks
    std::string words(int ranks) const;
};

// "movement 7"
std::string place(int stream, uint64_t number);

}  // namespace accelz
