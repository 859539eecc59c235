#include "segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

#include "errors.h"

namespace accelz {
namespace {

// This process's segments by descriptor. The mutex is held whenever a descriptor exists that is not in the map.
struct Registry {
    std::mutex mutex;
    std::map<int, std::weak_ptr<Mapping>> segments;
};

Registry &registry();

// A forked child (a data loader's worker, say) is no rank: it must not keep the memory alive after the ranks have left.
// Mappings do not reach it (MADV_DONTFORK), and descriptors are closed here.
void forget_in_child() {
    for (const auto &segment : registry().segments) close(segment.first);
    registry().segments.clear();
    registry().mutex.unlock();
}

Registry &registry() {
    static Registry *instance = [] {
        Registry *made = new Registry;  // never destroyed, because static destructors may close channels
        pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); }, forget_in_child);
        return made;
    }();
    return *instance;
}

size_t whole_pages(size_t bytes) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
}

std::runtime_error failed(const char *what, size_t bytes) {
    return std::runtime_error(text("cannot ", what, " ", bytes, " bytes of shared memory: ", std::strerror(errno)));
}

std::shared_ptr<Mapping> map(int descriptor, size_t bytes, int protection) {
    void *data = mmap(nullptr, bytes, protection, MAP_SHARED, descriptor, 0);
    if (data == MAP_FAILED) return nullptr;
    madvise(data, bytes, MADV_DONTFORK);
    return std::make_shared<Mapping>(static_cast<char *>(data), bytes);
}

}  // namespace

Mapping::~Mapping() { munmap(data, bytes); }

Segment::Segment(size_t capacity) {
    capacity = whole_pages(capacity);
    std::lock_guard<std::mutex> lock(registry().mutex);
    descriptor_ = memfd_create("accelz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor_ < 0) throw failed("create", capacity);
    // The size is sealed, so that nobody can cut off pages that another process is about to read.
    const bool sized = fchmod(descriptor_, 0600) == 0 && ftruncate(descriptor_, off_t(capacity)) == 0 &&
                       fcntl(descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
    if (sized) mapping_ = map(descriptor_, capacity, PROT_READ | PROT_WRITE);
    if (!mapping_) {
        const std::runtime_error error = failed("map", capacity);
        close(descriptor_);
        throw error;
    }
    registry().segments[descriptor_] = mapping_;
}

Segment::~Segment() {
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (registry().segments.erase(descriptor_)) close(descriptor_);
}

void Segment::reserve(size_t bytes) {
    bytes = whole_pages(bytes);
    if (bytes <= reserved_) return;
    int result;
    do {
        result = fallocate(descriptor_, FALLOC_FL_KEEP_SIZE, off_t(reserved_), off_t(bytes - reserved_));
    } while (result != 0 && errno == EINTR);
    if (result != 0) throw failed("reserve", bytes - reserved_);
    reserved_ = bytes;
}

void Segment::trim(size_t bytes) {
    bytes = whole_pages(bytes);
    if (bytes >= reserved_) return;
    const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    if (fallocate(descriptor_, mode, off_t(bytes), off_t(reserved_ - bytes)) == 0) reserved_ = bytes;
}

std::shared_ptr<Mapping> map_segment(pid_t owner, int descriptor, size_t capacity, bool writable) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (owner == getpid()) {
        const auto found = registry().segments.find(descriptor);
        const auto mapping = found == registry().segments.end() ? nullptr : found->second.lock();
        if (!mapping) throw std::runtime_error(text("this process has no shared memory ", descriptor));
        return mapping;
    }
    const std::string path = text("/proc/", owner, "/fd/", descriptor);
    const int opened = open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    std::shared_ptr<Mapping> mapping;
    if (opened >= 0) mapping = map(opened, whole_pages(capacity), writable ? PROT_READ | PROT_WRITE : PROT_READ);
    const std::string reason = std::strerror(errno);
    if (opened >= 0) close(opened);
    if (!mapping) throw std::runtime_error(text("cannot map memory of process ", owner, " (", path, "): ", reason));
    return mapping;
}

}  // namespace accelz
