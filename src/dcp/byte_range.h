#pragma once

// The bytes of one item.

#include <fsdp2/dcp/storage.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace fsdp2::dcp::detail {

/// CRC-32 of blocks of `block` bytes, of which the last may be shorter.
struct BlockChecksums {
  std::span<const uint32_t> sums;
  uint64_t block = 0;
};

/// Bytes [base, base + length) of a file; of those read in small pieces the last block is kept. Where checksums are
/// given, every byte that comes out was checked: reads take in whole blocks.
class ByteRange {
 public:
  ByteRange(std::shared_ptr<const InputFile> file, uint64_t base, uint64_t length, const std::string& key,
            BlockChecksums checksums = {});
  /// Bytes in memory, e.g. what was decompressed.
  ByteRange(std::string content, std::string what);

  uint64_t size() const { return length_; }
  /// File, range and key, for messages.
  const std::string& what() const { return what_; }
  bool is_checked() const { return !checksums_.sums.empty(); }
  void read(uint64_t offset, void* out, size_t size) const;
  std::string read_text(uint64_t offset, size_t size) const;

 private:
  void check_bounds(uint64_t offset, uint64_t size) const;
  void read_blocks(uint64_t offset, char* out, size_t size) const;
  void read_block(uint64_t start, char* out, size_t size) const;

  std::shared_ptr<const InputFile> file_;
  uint64_t base_ = 0, length_ = 0;
  std::string what_;
  BlockChecksums checksums_;
  uint64_t block_ = 0;                     // bytes
  std::string content_;                    // instead of a file
  mutable std::unique_ptr<char[]> cache_;  // a block
  mutable uint64_t cached_at_ = UINT64_MAX;
};

}  // namespace fsdp2::dcp::detail
