#pragma once

// The zip archives that torch.save makes: stored records only, CRC-32, zip64.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dcp/byte_range.h"
#include "dcp/byte_sink.h"

namespace fsdp2::dcp::detail {

class ZipReader {
 public:
  struct Record {
    std::string name;  // without the archive's own prefix
    std::string full_name;
    uint64_t size = 0, header_offset = 0;
    uint32_t crc = 0;
  };

  /// `verify` compares the CRC-32 of records, where the bytes are not checked anyway.
  ZipReader(const ByteRange& bytes, bool verify);

  const Record* find(std::string_view name) const;
  /// kCorruption naming the record if there is none.
  const Record& at(std::string_view name) const;
  /// Reads the whole record, which is `record.size` bytes, and checks it.
  void read(const Record& record, void* out) const;
  /// For each record, whether used or not, as read() does.
  void check_all() const;
  std::string read_text(const Record& record, size_t limit) const;
  const std::string& what() const { return bytes_.what(); }

 private:
  friend class RecordReader;
  uint64_t data_offset(const Record& record) const;
  void read_directory(uint64_t offset, uint64_t size, uint64_t count);
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const;

  const ByteRange& bytes_;
  bool verify_;
  uint64_t directory_ = 0;       // offset: records end before it
  std::vector<Record> records_;  // by name
};

/// Reads ranges of a record in ascending order. What lies between them is read too where that is the only way to check
/// the record.
class RecordReader {
 public:
  RecordReader(const ZipReader& archive, const ZipReader::Record& record, bool verify = true);
  void read(uint64_t offset, void* out, uint64_t size);
  /// Checks the record.
  void finish();

 private:
  void pass(void* out, uint64_t size);
  void skip_to(uint64_t offset);

  const ZipReader& archive_;
  const ZipReader::Record& record_;
  uint64_t data_ = 0;  // where the record's bytes begin
  uint64_t position_ = 0;
  bool sums_ = false;
  uint32_t crc_ = 0;
};

/// Writes one archive, record by record, in the layout of torch.save.
class ZipWriter {
 public:
  explicit ZipWriter(ByteSink& out);
  void record(std::string_view name, const void* data, size_t size);
  void record(std::string_view name, std::string_view text) { record(name, text.data(), text.size()); }
  /// A record in pieces.
  void begin_record(std::string_view name);
  void append(const void* data, size_t size);
  void end_record();
  void finish();

 private:
  struct Entry {
    std::string name;
    uint64_t offset, size;
    uint32_t crc;
  };
  ByteSink& out_;
  uint64_t base_;
  std::vector<Entry> entries_;
};

}  // namespace fsdp2::dcp::detail
