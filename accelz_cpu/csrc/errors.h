// Reasons of failure, kept per thread for accelz_last_error().
#pragma once

#include <exception>
#include <sstream>
#include <string>

namespace accelz {

void set_error(const std::string &reason);

// The parts, joined.
template <class... Parts>
std::string text(const Parts &...parts) {
    std::ostringstream stream;
    (stream << ... << parts);
    return stream.str();
}

// Run body; on an exception, keep its message and return `failure`.
template <class Result, class Body>
Result guarded(Result failure, Body &&body) {
    try {
        return body();
    } catch (const std::exception &error) {
        set_error(error.what());
        return failure;
    }
}

}  // namespace accelz
