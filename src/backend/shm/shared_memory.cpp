#include "backend/shm/shared_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include <fsdp2/error.h>

namespace fsdp2::detail::shm {

namespace {

struct MemoryLimit {
  uint64_t free_bytes = std::numeric_limits<uint64_t>::max();
  std::string name;
};

/// The number after `key` in a file of "key number" lines, or the only number of a file where `key` is empty.
bool read_number(const std::string& path, const std::string& key, uint64_t& number) {
  std::ifstream file(path);
  std::string word;
  while (key.empty() ? file.good() : static_cast<bool>(file >> word)) {
    if (key.empty() || word == key) return static_cast<bool>(file >> number);
  }
  return false;
}

void lower(MemoryLimit& limit, const std::string& folder, const char* max_file, const char* used_file) {
  uint64_t most = 0, used = 0, cached = 0;
  if (!read_number(folder + max_file, "", most) || !read_number(folder + used_file, "", used)) return;
  read_number(folder + "/memory.stat", "inactive_file", cached);  // can be given up at any time
  const uint64_t taken = used - std::min(used, cached);
  const uint64_t free_bytes = most - std::min(most, taken);
  if (free_bytes < limit.free_bytes) limit = {free_bytes, folder + max_file};
}

/// The tightest of the machine's free memory and the control groups that this process is in.
MemoryLimit memory_limit() {
  MemoryLimit limit;
  uint64_t kib = 0;
  if (read_number("/proc/meminfo", "MemAvailable:", kib)) limit = {kib * 1024, "MemAvailable in /proc/meminfo"};
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const bool second_version = line.rfind("0::", 0) == 0;
    const size_t memory = line.find(":memory:");
    if (!second_version && memory == std::string::npos) continue;
    std::string path = line.substr(second_version ? 3 : memory + 8);
    for (;;) {
      if (path == "/") path.clear();
      if (second_version) {
        lower(limit, "/sys/fs/cgroup" + path, "/memory.max", "/memory.current");
      } else {
        lower(limit, "/sys/fs/cgroup/memory" + path, "/memory.limit_in_bytes", "/memory.usage_in_bytes");
      }
      if (path.empty()) break;
      path.resize(path.rfind('/'));
    }
  }
  return limit;
}

}  // namespace

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

File make_memory_file(size_t bytes, size_t expected_bytes, const char* what) {
  const MemoryLimit limit = memory_limit();
  FSDP2_CHECK(expected_bytes <= limit.free_bytes, kIo, "[shm] ", what, " needs ", expected_bytes,
              " bytes of shared memory; ", limit.name, " leaves ", limit.free_bytes,
              ": raise the limit, use fewer ranks or a smaller model on this host, or use backend \"cpu:gloo\"");
  // A file that grows beyond this limit ends the program by SIGXFSZ instead of failing.
  rlimit largest_file{};
  FSDP2_CHECK(::getrlimit(RLIMIT_FSIZE, &largest_file) != 0 || largest_file.rlim_cur == RLIM_INFINITY ||
                  bytes <= largest_file.rlim_cur,
              kIo, "[shm] ", what, " needs ", bytes, " bytes of shared memory, files of this process may have ",
              largest_file.rlim_cur, ": see ulimit -f");
  File file(::memfd_create("fsdp2", MFD_CLOEXEC));
  FSDP2_CHECK(file.is_open(), kIo, "[shm] making memory for ", what, " failed: memfd_create: ", std::strerror(errno),
              "; shared memory needs it: use backend \"cpu:gloo\"");
  FSDP2_CHECK(::ftruncate(file.fd(), static_cast<off_t>(bytes)) == 0, kIo, "[shm] ", what, " needs ", bytes,
              " bytes of shared memory: ftruncate: ", std::strerror(errno));
  return file;
}

SharedMemory::SharedMemory(const File& file, size_t bytes, const char* what) : bytes_(bytes) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0);
  FSDP2_CHECK(address != MAP_FAILED, kIo, "[shm] mapping ", bytes, " bytes for ", what, ": ", std::strerror(errno),
              "; see ulimit -v and vm.max_map_count");
  data_ = static_cast<std::byte*>(address);
  ::madvise(address, bytes, MADV_HUGEPAGE);  // only a wish: systems without it go on with small pages
}

SharedMemory::~SharedMemory() { ::munmap(data_, bytes_); }

void SharedMemory::populate(size_t offset, size_t bytes, const char* what) const {
#ifdef MADV_POPULATE_WRITE
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t begin = offset / page * page;
  const size_t end = std::min((offset + bytes + page - 1) / page * page, (bytes_ + page - 1) / page * page);
  if (begin >= end || ::madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE) == 0) return;
  // Kernels before 5.14 know no such advice: there the first touch does it.
  FSDP2_CHECK(errno == EINVAL, kIo, "[shm] taking ", bytes, " bytes of memory for ", what, ": ", std::strerror(errno));
#else
  (void)offset, (void)bytes, (void)what;
#endif
}

}  // namespace fsdp2::detail::shm
