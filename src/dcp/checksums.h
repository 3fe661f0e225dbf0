#pragma once

// The file `.checksums` beside `.metadata`: CRC-32 of every item of a checkpoint, block by block. Python ignores it.
//
// Note [Layout of .checksums]
// All numbers are little-endian. "fsdp2 checksums 1\n", u32 bytes of a block, u32 number of files; for each file u32
// length of its name, the name, u64 number of items; for each item u64 offset, u64 length, one u32 CRC per block of
// the item (the last block may be shorter). At the end the u32 CRC of all that. Metadata files are files with one item.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "dcp/byte_range.h"
#include "dcp/file_writer.h"

namespace fsdp2::dcp::detail {

class Checksums {
 public:
  void add_file(const std::string& file) { files_[file]; }
  /// Items of a file are added in the order in which they lie.
  void add(const std::string& file, uint64_t offset, uint64_t length, const std::vector<uint32_t>& blocks);
  std::string encode() const;

  /// kCorruption naming `what` unless every byte is as it was written.
  static Checksums decode(const std::string& content, const std::string& what);
  /// Of the item that lies exactly there; empty if there is none.
  BlockChecksums find(const std::string& file, uint64_t offset, uint64_t length) const;
  /// Whether the file with one item is as it was written.
  bool match(const std::string& file, const std::string& content) const;
  /// Where the last item of the file ends; 0 for files without items.
  uint64_t file_size(const std::string& file) const;
  bool has_file(const std::string& file) const { return files_.count(file) != 0; }
  std::vector<std::string> files() const;

 private:
  struct Item {
    uint64_t offset, length;
    size_t first;  // of its blocks
  };
  struct File {
    std::vector<Item> items;
    std::vector<uint32_t> blocks;
  };
  std::map<std::string, File> files_;
  uint64_t block_ = kChecksumBlock;  // other releases may have written other ones
};

/// CRC-32 of the blocks of bytes in memory.
std::vector<uint32_t> block_checksums(const std::string& content, uint64_t block = kChecksumBlock);

}  // namespace fsdp2::dcp::detail
