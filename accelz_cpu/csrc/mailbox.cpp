#include "mailbox.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace accelz {

void ring(Mailbox &mailbox) {
    mailbox.bell.fetch_add(1);
    // Both sides are sequentially consistent: either the sleeper is seen here, or it sees the new bell.
    if (mailbox.sleepers.load() == 0) return;
    syscall(SYS_futex, &mailbox.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void sleep_on_bell(Mailbox &mailbox, uint32_t seen, double seconds) {
    const timespec limit{time_t(seconds), long((seconds - double(time_t(seconds))) * 1e9)};
    mailbox.sleepers.fetch_add(1);
    if (mailbox.bell.load() == seen) syscall(SYS_futex, &mailbox.bell, FUTEX_WAIT, seen, &limit, nullptr, 0);
    mailbox.sleepers.fetch_sub(1);
}

}  // namespace accelz
