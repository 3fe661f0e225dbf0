#pragma once

// The zip archives that torch.save makes: stored records only, CRC-32, zip64.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dcp/file_system.h"

namespace fsdp2::dcp::detail {

/// Bytes [base, base + length) of a file; small ones are read at once and kept.
class ByteRange {
 public:
  ByteRange(std::shared_ptr<const FileReader> file, uint64_t base, uint64_t length, std::string what);
  uint64_t size() const { return length_; }
  /// File, range and key, for messages.
  const std::string& what() const { return what_; }
  void read(uint64_t offset, void* out, size_t size) const;
  std::string read_text(uint64_t offset, size_t size) const;

 private:
  std::shared_ptr<const FileReader> file_;
  uint64_t base_, length_;
  std::string what_;
  std::string cache_;
};

class ZipReader {
 public:
  struct Record {
    std::string name;  // without the archive's own prefix
    std::string full_name;
    uint64_t size = 0, header_offset = 0;
    uint32_t crc = 0;
  };

  ZipReader(const ByteRange& bytes, bool verify);

  const Record* find(std::string_view name) const;
  /// kCorruption naming the record if there is none.
  const Record& at(std::string_view name) const;
  /// Reads the whole record, which is `record.size` bytes, and checks it.
  void read(const Record& record, void* out) const;
  std::string read_text(const Record& record, size_t limit) const;
  const std::string& what() const { return bytes_.what(); }

 private:
  void read_directory(uint64_t offset, uint64_t size, uint64_t count);
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const;

  const ByteRange& bytes_;
  bool verify_;
  uint64_t directory_ = 0;       // offset: records end before it
  std::vector<Record> records_;  // by name
};

/// Writes one archive to a file, record by record, in the layout of torch.save.
class ZipWriter {
 public:
  ZipWriter(FileWriter& out, bool checksums);
  void record(std::string_view name, const void* data, size_t size);
  void record(std::string_view name, std::string_view text) { record(name, text.data(), text.size()); }
  void finish();

 private:
  struct Entry {
    std::string name;
    uint64_t offset, size;
    uint32_t crc;
  };
  FileWriter& out_;
  bool checksums_;
  uint64_t base_;
  std::vector<Entry> entries_;
};

}  // namespace fsdp2::dcp::detail
