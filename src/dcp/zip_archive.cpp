#include "dcp/zip_archive.h"

#include <fsdp2/error.h>

#include <algorithm>
#include <cstring>

#include "dcp/crc32.h"

namespace fsdp2::dcp::detail {
namespace {

// Layout of zip structures, as in PKWARE's APPNOTE. All numbers are little-endian.
constexpr uint32_t kLocalHeader = 0x04034b50, kDescriptor = 0x08074b50, kDirectoryEntry = 0x02014b50;
constexpr uint32_t kEnd = 0x06054b50, kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
constexpr size_t kLocalHeaderBytes = 30, kDirectoryEntryBytes = 46, kEndBytes = 22, kEnd64Bytes = 56,
                 kLocator64Bytes = 20;
constexpr uint16_t kZip64Field = 1, kPaddingField = 0x4246;  // "FB"
constexpr uint16_t kDescriptorFlag = 1 << 3, kUtf8Flag = 1 << 11;
constexpr uint32_t kIn64 = 0xFFFFFFFF;
constexpr size_t kAlignment = 64;
constexpr size_t kBlockBytes = size_t{256} << 10;  // a block is checked while it is in the cache
constexpr uint64_t kMaxDirectoryBytes = uint64_t{256} << 20;

template <class T>
T number(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

class Bytes {
 public:
  template <class T>
  Bytes& add(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return *this;
  }
  Bytes& text(std::string_view text) {
    out_.append(text);
    return *this;
  }
  const std::string& str() const { return out_; }

 private:
  std::string out_;
};

}  // namespace

template <class... Parts>
void ZipReader::fail(const Parts&... parts) const {
  FSDP2_THROW(kCorruption, "[dcp] ", bytes_.what(), ": not a whole torch.save archive: ", parts...);
}

ZipReader::ZipReader(const ByteRange& bytes, bool verify) : bytes_(bytes), verify_(verify) {
  const uint64_t total = bytes.size();
  if (total < kEndBytes) fail("it has ", total, " bytes");
  // torch writes no archive comment, so the end record is at the end; other writers may add up to
  // 64 KiB.
  const size_t tail_bytes = static_cast<size_t>(std::min<uint64_t>(total, kEndBytes + 0xFFFF));
  std::string tail = bytes.read_text(total - kEndBytes, kEndBytes);
  size_t end = 0;
  if (number<uint32_t>(tail.data()) != kEnd || number<uint16_t>(tail.data() + 20) != 0) {
    tail = bytes.read_text(total - tail_bytes, tail_bytes);
    end = tail_bytes - kEndBytes;
    const auto is_end = [&] {
      return number<uint32_t>(tail.data() + end) == kEnd &&
             end + kEndBytes + number<uint16_t>(tail.data() + end + 20) == tail_bytes;
    };
    while (!is_end()) {
      if (end-- == 0) fail("it has no end record");
    }
  }
  const uint64_t end_offset = total - tail.size() + end;
  uint64_t count = number<uint16_t>(tail.data() + end + 10);
  uint64_t size = number<uint32_t>(tail.data() + end + 12);
  uint64_t offset = number<uint32_t>(tail.data() + end + 16);
  if (end_offset >= kLocator64Bytes) {
    const std::string locator = bytes.read_text(end_offset - kLocator64Bytes, kLocator64Bytes);
    if (number<uint32_t>(locator.data()) == kLocator64) {
      const uint64_t end64 = number<uint64_t>(locator.data() + 8);
      if (end64 > total || total - end64 < kEnd64Bytes)
        fail("its zip64 end record is at ", end64, " of ", total, " bytes");
      const std::string record = bytes.read_text(end64, kEnd64Bytes);
      if (number<uint32_t>(record.data()) != kEnd64) fail("there is no zip64 end record at ", end64);
      count = number<uint64_t>(record.data() + 32);
      size = number<uint64_t>(record.data() + 40);
      offset = number<uint64_t>(record.data() + 48);
    }
  }
  if (offset > total || size > total - offset)
    fail("its directory of ", size, " bytes at ", offset, " leaves the ", total, " bytes");
  if (size > kMaxDirectoryBytes || count > size / kDirectoryEntryBytes)
    fail("its directory of ", size, " bytes claims ", count, " records");
  read_directory(offset, size, count);
}

void ZipReader::read_directory(uint64_t offset, uint64_t size, uint64_t count) {
  directory_ = offset;
  const std::string directory = bytes_.read_text(offset, size);
  size_t at = 0;
  std::string prefix;
  for (uint64_t i = 0; i < count; ++i) {
    if (directory.size() - at < kDirectoryEntryBytes) fail("its directory ends within record ", i);
    const char* entry = directory.data() + at;
    if (number<uint32_t>(entry) != kDirectoryEntry) fail("record ", i, " of its directory is damaged");
    const uint16_t method = number<uint16_t>(entry + 10), name_bytes = number<uint16_t>(entry + 28);
    const uint16_t extra_bytes = number<uint16_t>(entry + 30), comment_bytes = number<uint16_t>(entry + 32);
    if (directory.size() - at - kDirectoryEntryBytes < size_t{name_bytes} + extra_bytes + comment_bytes)
      fail("its directory ends within record ", i);
    Record record;
    record.full_name.assign(entry + kDirectoryEntryBytes, name_bytes);
    record.crc = number<uint32_t>(entry + 16);
    uint64_t stored = number<uint32_t>(entry + 20);
    record.size = number<uint32_t>(entry + 24);
    record.header_offset = number<uint32_t>(entry + 42);
    const char* extra = entry + kDirectoryEntryBytes + name_bytes;
    const char* extra_end = extra + extra_bytes;
    while (extra_end - extra >= 4) {
      const uint16_t field = number<uint16_t>(extra), field_bytes = number<uint16_t>(extra + 2);
      extra += 4;
      if (extra_end - extra < field_bytes) fail("record ", i, " of its directory is damaged");
      if (field == kZip64Field) {
        size_t used = 0;
        for (uint64_t* value : {&record.size, &stored, &record.header_offset}) {
          if (*value != kIn64) continue;
          if (field_bytes - used < 8) fail("record ", i, " of its directory is damaged");
          *value = number<uint64_t>(extra + used);
          used += 8;
        }
      }
      extra += field_bytes;
    }
    if (method != 0 || stored != record.size) {
      fail("record ", record.full_name, " is compressed (method ", method, ", ", stored, " of ", record.size,
           " bytes); torch stores records as they are");
    }
    if (record.header_offset > directory_ || record.size > directory_ - record.header_offset) {
      fail("record ", record.full_name, " of ", record.size, " bytes at ", record.header_offset, " leaves the item");
    }
    if (i == 0) {
      const size_t slash = record.full_name.find('/');
      if (slash == std::string::npos) fail("its first record is ", record.full_name, ", without a folder");
      prefix = record.full_name.substr(0, slash + 1);
    }
    if (record.full_name.compare(0, prefix.size(), prefix) != 0)
      fail("record ", record.full_name, " is outside of ", prefix);
    record.name = record.full_name.substr(prefix.size());
    records_.push_back(std::move(record));
    at += kDirectoryEntryBytes + name_bytes + extra_bytes + comment_bytes;
  }
  std::sort(records_.begin(), records_.end(), [](const Record& a, const Record& b) { return a.name < b.name; });
  const auto twice = std::adjacent_find(records_.begin(), records_.end(),
                                        [](const Record& a, const Record& b) { return a.name == b.name; });
  if (twice != records_.end()) fail("record ", twice->full_name, " is there twice");
}

const ZipReader::Record* ZipReader::find(std::string_view name) const {
  const auto found =
      std::lower_bound(records_.begin(), records_.end(), name,
                       [](const Record& record, std::string_view wanted) { return record.name < wanted; });
  return found == records_.end() || found->name != name ? nullptr : &*found;
}
const ZipReader::Record& ZipReader::at(std::string_view name) const {
  const Record* record = find(name);
  if (record == nullptr) fail("it has no record ", name);
  return *record;
}

uint64_t ZipReader::data_offset(const Record& record) const {
  const std::string header = bytes_.read_text(record.header_offset, kLocalHeaderBytes);
  if (number<uint32_t>(header.data()) != kLocalHeader)
    fail("there is no header of ", record.full_name, " at ", record.header_offset);
  const uint64_t data = record.header_offset + kLocalHeaderBytes + number<uint16_t>(header.data() + 26) +
                        number<uint16_t>(header.data() + 28);
  if (number<uint16_t>(header.data() + 8) != 0 || data > directory_ || record.size > directory_ - data) {
    fail("the header of ", record.full_name, " at ", record.header_offset, " contradicts the directory");
  }
  return data;
}

void ZipReader::read(const Record& record, void* out) const {
  RecordReader reader(*this, record);
  reader.read(0, out, record.size);
  reader.finish();
}

void ZipReader::check_all() const {
  for (const Record& record : records_) RecordReader(*this, record).finish();
}

RecordReader::RecordReader(const ZipReader& archive, const ZipReader::Record& record, bool verify)
    : archive_(archive),
      record_(record),
      data_(archive.data_offset(record)),
      sums_(verify && archive.verify_ && !archive.bytes_.is_checked() && record.crc != 0) {
}  // 0: the writer computed none

void RecordReader::pass(void* out, uint64_t size) {
  auto* bytes = static_cast<char*>(out);
  if (!sums_) {
    archive_.bytes_.read(data_ + position_, bytes, static_cast<size_t>(size));
    position_ += size;
    return;
  }
  while (size > 0) {
    const auto block = static_cast<size_t>(std::min<uint64_t>(size, kBlockBytes));
    archive_.bytes_.read(data_ + position_, bytes, block);
    crc_ = crc32(crc_, bytes, block);
    bytes += block;
    position_ += block;
    size -= block;
  }
}

void RecordReader::skip_to(uint64_t offset) {
  if (!sums_) {
    position_ = offset;
    return;
  }
  std::vector<char> scratch(static_cast<size_t>(std::min<uint64_t>(kBlockBytes, offset - position_)));
  while (position_ < offset) pass(scratch.data(), std::min<uint64_t>(scratch.size(), offset - position_));
}

void RecordReader::read(uint64_t offset, void* out, uint64_t size) {
  if (offset < position_ || offset > record_.size || size > record_.size - offset)
    archive_.fail("wanted are ", size, " bytes at ", offset, " of record ", record_.full_name, " of ", record_.size);
  if (offset > position_) skip_to(offset);
  pass(out, size);
}

void RecordReader::finish() {
  if (!sums_) return;
  skip_to(record_.size);
  if (crc_ != record_.crc)
    archive_.fail("the checksum of ", record_.full_name, " is ", crc_, ", recorded is ", record_.crc,
                  "; the data were changed after saving");
}

std::string ZipReader::read_text(const Record& record, size_t limit) const {
  if (record.size > limit)
    fail("record ", record.full_name, " has ", record.size, " bytes; at most ", limit, " are read");
  std::string result(record.size, '\0');
  read(record, result.data());
  return result;
}

ZipWriter::ZipWriter(ByteSink& out) : out_(out), base_(out.position()) {}

void ZipWriter::record(std::string_view name, const void* data, size_t size) {
  begin_record(name);
  append(data, size);
  end_record();
}

void ZipWriter::begin_record(std::string_view name) {
  Entry entry{"archive/" + std::string(name), out_.position() - base_, 0, 0};
  // Sizes and checksum come after the data and in the directory: nothing has to be known, or
  // computed, before.
  const size_t before_data = entry.offset + kLocalHeaderBytes + entry.name.size() + 4;
  const size_t padding = (kAlignment - before_data % kAlignment) % kAlignment;
  Bytes header;
  header.add(kLocalHeader).add(uint16_t{20}).add(uint16_t(kDescriptorFlag | kUtf8Flag)).add(uint16_t{0});
  header.add(uint16_t{0}).add(uint16_t{0x21});  // 1 January 1980: the same state gives the same bytes
  header.add(uint32_t{0}).add(uint32_t{0}).add(uint32_t{0});
  header.add(static_cast<uint16_t>(entry.name.size())).add(static_cast<uint16_t>(4 + padding)).text(entry.name);
  header.add(kPaddingField).add(static_cast<uint16_t>(padding)).text(std::string(padding, 'Z'));
  out_.write(header.str().data(), header.str().size());
  entries_.push_back(std::move(entry));
}

void ZipWriter::append(const void* data, size_t size) {
  Entry& entry = entries_.back();
  const uint32_t crc = out_.write(data, size);
  entry.crc = entry.size == 0 ? crc : joined_crc32(entry.crc, crc, size);
  entry.size += size;
}

void ZipWriter::end_record() {
  const Entry& entry = entries_.back();
  Bytes descriptor;
  descriptor.add(kDescriptor).add(entry.crc);
  if (entry.size >= kIn64) {
    descriptor.add(entry.size).add(entry.size);
  } else {
    descriptor.add(static_cast<uint32_t>(entry.size)).add(static_cast<uint32_t>(entry.size));
  }
  out_.write(descriptor.str().data(), descriptor.str().size());
}

void ZipWriter::finish() {
  const uint64_t start = out_.position() - base_;
  Bytes bytes;
  for (const Entry& entry : entries_) {
    const bool big_size = entry.size >= kIn64, big_offset = entry.offset >= kIn64;
    const uint16_t extra = big_size || big_offset ? uint16_t(4 + 16 * big_size + 8 * big_offset) : uint16_t{0};
    const uint32_t size = big_size ? kIn64 : static_cast<uint32_t>(entry.size);
    bytes.add(kDirectoryEntry)
        .add(uint16_t{extra ? uint16_t{45} : uint16_t{20}})
        .add(uint16_t{extra ? uint16_t{45} : uint16_t{20}});
    bytes.add(uint16_t(kDescriptorFlag | kUtf8Flag)).add(uint16_t{0}).add(uint16_t{0}).add(uint16_t{0x21});
    bytes.add(entry.crc).add(size).add(size).add(static_cast<uint16_t>(entry.name.size())).add(extra);
    bytes.add(uint16_t{0}).add(uint16_t{0}).add(uint16_t{0}).add(uint32_t{0});
    bytes.add(big_offset ? kIn64 : static_cast<uint32_t>(entry.offset)).text(entry.name);
    if (extra) {
      bytes.add(kZip64Field).add(uint16_t(extra - 4));
      if (big_size) bytes.add(entry.size).add(entry.size);
      if (big_offset) bytes.add(entry.offset);
    }
  }
  const uint64_t size = bytes.str().size(), count = entries_.size();
  bytes.add(kEnd64)
      .add(uint64_t{kEnd64Bytes - 12})
      .add(uint16_t{45})
      .add(uint16_t{45})
      .add(uint32_t{0})
      .add(uint32_t{0});
  bytes.add(count).add(count).add(size).add(start);
  bytes.add(kLocator64).add(uint32_t{0}).add(uint64_t{start + size}).add(uint32_t{1});
  bytes.add(kEnd).add(uint16_t{0}).add(uint16_t{0});
  bytes.add(static_cast<uint16_t>(count)).add(static_cast<uint16_t>(count));
  bytes.add(size >= kIn64 ? kIn64 : static_cast<uint32_t>(size))
      .add(start >= kIn64 ? kIn64 : static_cast<uint32_t>(start));
  bytes.add(uint16_t{0});
  out_.write(bytes.str().data(), bytes.str().size());
}

}  // namespace fsdp2::dcp::detail
