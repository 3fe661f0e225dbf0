#pragma once

// Memory that several processes map: a file without a name, which is gone when the last of them is.

#include <cstddef>

namespace fsdp2::detail::shm {

/// A file descriptor that is closed with the object.
class File {
 public:
  File() = default;
  explicit File(int fd) : fd_(fd) {}
  File(File&& other) noexcept : fd_(other.release()) {}
  File& operator=(File&& other) noexcept;
  ~File();

  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_ = -1;
};

/// A nameless file of `bytes` zeros that takes memory page by page as it is written to. kIo, with the limits, where
/// `expected_bytes` of it would not fit into the memory that this process may still use. `what` names it in errors.
File make_memory_file(size_t bytes, size_t expected_bytes, const char* what);

class SharedMemory {
 public:
  /// Maps the whole file. kIo where the system refuses.
  SharedMemory(const File& file, size_t bytes, const char* what);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const { return data_; }  // page-aligned
  size_t bytes() const { return bytes_; }

  /// Takes memory for [offset, offset + bytes) now, near the calling thread, instead of at the first touch of each
  /// page.
  void populate(size_t offset, size_t bytes, const char* what) const;

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace fsdp2::detail::shm
