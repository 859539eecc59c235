// Another rank, as seen from this one.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "mailbox.h"
#include "segment.h"

namespace accelz {

// Another process, through a handle that zombies and reused process ids do not fool.
class Process {
   public:
    explicit Process(int64_t id);
    ~Process();
    Process(const Process &) = delete;
    Process &operator=(const Process &) = delete;

    int64_t id() const { return id_; }
    bool ended() const;

   private:
    int64_t id_;
    int handle_;
};

class Peer {
   public:
    // Maps the mailbox of rank `rank` of `size`. Throws std::runtime_error.
    Peer(int rank, int size, int64_t process, int descriptor);

    Mailbox &mailbox() const { return *mailbox_; }
    int64_t process() const { return process_.id(); }

    // The rank's note of a collective, or nullptr while there is none.
    const Post *post(int stream, uint64_t number) const;

    // What the rank has published for a collective that it has posted. Throws std::runtime_error.
    const char *data(const Post &post);

    // Whether the rank will post nothing more. Asks the kernel.
    bool gone() const { return mailbox_->leaving.load() || process_.ended(); }

    bool failed() const { return mailbox_->failed.load(std::memory_order_acquire); }
    uint64_t consumed(int stream) const { return mailbox_->consumed[stream].load(std::memory_order_acquire); }
    uint64_t posted(int stream) const { return mailbox_->posted[stream].load(std::memory_order_acquire); }

   private:
    struct Mapped {
        uint32_t generation = 0;
        std::shared_ptr<Mapping> mapping;
    };

    Process process_;
    std::shared_ptr<Mapping> mapping_;
    Mailbox *mailbox_;
    std::mutex mutex_;  // guards blocks_
    std::vector<Mapped> blocks_;
};

}  // namespace accelz
