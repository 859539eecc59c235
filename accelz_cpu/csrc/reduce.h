// Sums, maxima and minima of several arrays.
#pragma once

#include <cstddef>
#include <vector>

namespace accelz {

// output[i] = parts[0][i] op parts[1][i] op …, in this order, on at most `threads` threads; 16-bit values are
// added in fp32 and rounded once. output may be one of the parts.
void reduce(char *output, const std::vector<const char *> &parts, int dtype, int op, size_t count, int threads);

}  // namespace accelz
