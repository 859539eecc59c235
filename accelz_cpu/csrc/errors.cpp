#include "errors.h"

#include "accelz_cpu.h"

namespace accelz {
namespace {
thread_local std::string last_error;
}

void set_error(const std::string &reason) { last_error = reason; }

}  // namespace accelz

extern "C" const char *accelz_last_error(void) { return accelz::last_error.c_str(); }
