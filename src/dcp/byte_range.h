#pragma once

// The bytes of one item.

#include <fsdp2/dcp/storage.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace fsdp2::dcp::detail {

/// Bytes [base, base + length) of a file; small ones are read at once and kept. Where checksums are given, every byte
/// that comes out was checked: reads take in whole blocks.
class ByteRange {
 public:
  ByteRange(std::shared_ptr<const InputFile> file, uint64_t base, uint64_t length, const std::string& key,
            std::span<const uint32_t> checksums = {});
  /// Bytes in memory, e.g. what was decompressed.
  ByteRange(std::string content, std::string what);

  uint64_t size() const { return length_; }
  /// File, range and key, for messages.
  const std::string& what() const { return what_; }
  bool is_checked() const { return !checksums_.empty(); }
  void read(uint64_t offset, void* out, size_t size) const;
  std::string read_text(uint64_t offset, size_t size) const;

 private:
  void check_bounds(uint64_t offset, uint64_t size) const;
  void read_checked(uint64_t offset, char* out, size_t size) const;
  void check_block(uint64_t block, const char* data, size_t size) const;

  std::shared_ptr<const InputFile> file_;
  uint64_t base_ = 0, length_ = 0;
  std::string what_;
  std::span<const uint32_t> checksums_;
  mutable std::string cache_;  // bytes from cached_at_ on
  mutable uint64_t cached_at_ = 0;
};

}  // namespace fsdp2::dcp::detail
