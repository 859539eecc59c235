#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "errors.h"

namespace accelz {
namespace {

// Segments of this process by descriptor.
struct Registry {
    std::mutex mutex;
    std::map<int, char *> segments;
};

Registry &registry() {
    static Registry *instance = new Registry;  // channels may be closed by static destructors
    return *instance;
}

size_t whole_pages(size_t bytes) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
}

std::runtime_error failed(const char *what, size_t bytes) {
    return std::runtime_error(text("cannot ", what, " ", bytes, " bytes of shared memory: ", std::strerror(errno)));
}

char *map(int descriptor, size_t bytes, int protection) {
    void *data = mmap(nullptr, bytes, protection, MAP_SHARED, descriptor, 0);
    if (data == MAP_FAILED) return nullptr;
    madvise(data, bytes, MADV_DONTFORK);  // a forked child is no rank: it must not keep the memory alive
    return static_cast<char *>(data);
}

}  // namespace

Segment::Segment(size_t capacity) : capacity_(whole_pages(capacity)) {
    descriptor_ = memfd_create("accelz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor_ < 0) throw failed("create", capacity_);
    // The size is sealed: nobody can cut off pages that another process is about to read.
    const bool sized = fchmod(descriptor_, 0600) == 0 && ftruncate(descriptor_, off_t(capacity_)) == 0 &&
                       fcntl(descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
    if (sized) data_ = map(descriptor_, capacity_, PROT_READ | PROT_WRITE);
    if (!data_) {
        const std::runtime_error error = failed("map", capacity_);
        close(descriptor_);
        throw error;
    }
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().segments[descriptor_] = data_;
}

Segment::~Segment() {
    {
        std::lock_guard<std::mutex> lock(registry().mutex);
        registry().segments.erase(descriptor_);
    }
    munmap(data_, capacity_);
    close(descriptor_);
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

View::View(pid_t owner, int descriptor, size_t capacity, bool writable) {
    if (owner == getpid()) {
        std::lock_guard<std::mutex> lock(registry().mutex);
        data_ = registry().segments.at(descriptor);
        return;
    }
    const std::string path = text("/proc/", owner, "/fd/", descriptor);
    const int opened = open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (opened >= 0) {
        mapped_ = whole_pages(capacity);
        data_ = map(opened, mapped_, writable ? PROT_READ | PROT_WRITE : PROT_READ);
        const int reason = errno;
        close(opened);
        errno = reason;
    }
    if (!data_)
        throw std::runtime_error(
            text("cannot map shared memory of process ", owner, " (", path, "): ", std::strerror(errno)));
}

View::~View() {
    if (mapped_) munmap(data_, mapped_);
}

View::View(View &&other) noexcept
    : data_(std::exchange(other.data_, nullptr)), mapped_(std::exchange(other.mapped_, 0)) {}

View &View::operator=(View &&other) noexcept {
    std::swap(data_, other.data_);
    std::swap(mapped_, other.mapped_);
    return *this;
}

}  // namespace accelz
