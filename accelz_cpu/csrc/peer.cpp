#include "peer.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>

#include "errors.h"

namespace accelz {

Process::Process(int64_t id) : id_(id), handle_(-1) {
#ifdef SYS_pidfd_open
    handle_ = int(syscall(SYS_pidfd_open, pid_t(id), 0));  // -1 before Linux 5.3
#endif
}

Process::~Process() {
    if (handle_ >= 0) close(handle_);
}

bool Process::ended() const {
    if (handle_ < 0) return kill(pid_t(id_), 0) != 0 && errno == ESRCH;
    pollfd waiting{handle_, POLLIN, 0};
    return poll(&waiting, 1, 0) == 1;
}

Peer::Peer(int rank, int size, int64_t process, int descriptor)
    : process_(process),
      mapping_(map_segment(pid_t(process), descriptor, sizeof(Mailbox), true)),
      mailbox_(reinterpret_cast<Mailbox *>(mapping_->data)),
      blocks_(BLOCKS) {
    if (mailbox_->magic != MAGIC || mailbox_->rank != rank || mailbox_->size != size)
        throw std::runtime_error(text("rank ", rank, " runs a different version of accelz-cpu"));
}

const Post *Peer::post(int stream, uint64_t number) const {
    const Post &post = mailbox_->posts[stream][number % RING];
    return post.number.load(std::memory_order_acquire) == number ? &post : nullptr;
}

const char *Peer::data(const Post &post) {
    if (post.bytes <= SMALL) return post.small;
    const BlockEntry &entry = mailbox_->blocks[post.block];
    std::lock_guard<std::mutex> lock(mutex_);
    Mapped &mapped = blocks_[post.block];
    if (mapped.generation != entry.generation) {
        mapped.mapping = map_segment(pid_t(process_.id()), entry.descriptor, entry.capacity, false);
        mapped.generation = entry.generation;
    }
    return mapped.mapping->data + post.offset;
}

}  // namespace accelz
