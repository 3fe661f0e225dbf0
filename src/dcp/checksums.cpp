#include "dcp/checksums.h"

#include <fsdp2/error.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "dcp/crc32.h"

namespace fsdp2::dcp::detail {
namespace {

constexpr std::string_view kMagic = "fsdp2 checksums 1\n";

constexpr uint64_t kLeastBlock = uint64_t{1} << 10, kMostBlock = uint64_t{64} << 20;

size_t num_blocks(uint64_t length, uint64_t block) {
  return static_cast<size_t>(length / block + (length % block != 0));
}

template <class T>
void append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

/// Numbers from bytes that another program may have written.
class Cursor {
 public:
  Cursor(std::string_view rest, const std::string& what) : rest_(rest), what_(what) {}
  std::string_view take(uint64_t size) {
    if (size > rest_.size()) fail("it ends too early");
    const std::string_view result = rest_.substr(0, static_cast<size_t>(size));
    rest_.remove_prefix(static_cast<size_t>(size));
    return result;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  size_t left() const { return rest_.size(); }
  [[noreturn]] void fail(const char* why) const {
    FSDP2_THROW(kCorruption, "[dcp] ", what_, " is damaged: ", why,
                "; without it the checkpoint loads with verify_checksums = false");
  }

 private:
  std::string_view rest_;
  const std::string& what_;
};

}  // namespace

void Checksums::add(const std::string& name, uint64_t offset, uint64_t length, const std::vector<uint32_t>& blocks) {
  File& file = files_[name];
  file.items.push_back({offset, length, file.blocks.size()});
  file.blocks.insert(file.blocks.end(), blocks.begin(), blocks.end());
}

std::string Checksums::encode() const {
  std::string out(kMagic);
  append(out, static_cast<uint32_t>(block_));
  append(out, static_cast<uint32_t>(files_.size()));
  for (const auto& [name, file] : files_) {
    append(out, static_cast<uint32_t>(name.size()));
    out += name;
    append(out, uint64_t{file.items.size()});
    for (const Item& item : file.items) {
      append(out, item.offset);
      append(out, item.length);
      out.append(reinterpret_cast<const char*>(file.blocks.data() + item.first),
                 num_blocks(item.length, block_) * sizeof(uint32_t));
    }
  }
  append(out, crc32(0, out.data(), out.size()));
  return out;
}

Checksums Checksums::decode(const std::string& content, const std::string& what) {
  Cursor in(content, what);
  if (in.take(kMagic.size()) != kMagic) in.fail("it does not begin as such a file does");
  if (content.size() < kMagic.size() + 12) in.fail("it ends too early");
  const size_t body = content.size() - sizeof(uint32_t);
  uint32_t recorded;
  std::memcpy(&recorded, content.data() + body, sizeof(recorded));
  if (recorded != crc32(0, content.data(), body)) in.fail("its own checksum differs");
  Checksums result;
  result.block_ = in.number<uint32_t>();
  if (result.block_ < kLeastBlock || result.block_ > kMostBlock) in.fail("its blocks have an impossible size");
  for (auto files = in.number<uint32_t>(); files > 0; --files) {
    const std::string name(in.take(in.number<uint32_t>()));
    File& file = result.files_[name];
    const auto count = in.number<uint64_t>();
    if (count > in.left() / (2 * sizeof(uint64_t))) in.fail("it ends too early");
    file.items.reserve(static_cast<size_t>(count));
    for (uint64_t i = 0; i < count; ++i) {
      const auto offset = in.number<uint64_t>(), length = in.number<uint64_t>();
      const uint64_t end = file.items.empty() ? 0 : file.items.back().offset + file.items.back().length;
      if (offset < end || length > UINT64_MAX - offset) in.fail("its items overlap");
      file.items.push_back({offset, length, file.blocks.size()});
      if (length / result.block_ > in.left()) in.fail("it ends too early");
      const size_t blocks = num_blocks(length, result.block_);
      const std::string_view sums = in.take(blocks * sizeof(uint32_t));
      file.blocks.resize(file.blocks.size() + blocks);
      std::memcpy(file.blocks.data() + file.items.back().first, sums.data(), sums.size());
    }
  }
  return result;
}

BlockChecksums Checksums::find(const std::string& name, uint64_t offset, uint64_t length) const {
  const auto file = files_.find(name);
  if (file == files_.end()) return {};
  const auto& items = file->second.items;
  // Items without bytes may share an offset with the next one.
  auto item = std::lower_bound(items.begin(), items.end(), offset,
                               [](const Item& entry, uint64_t wanted) { return entry.offset < wanted; });
  while (item != items.end() && item->offset == offset && item->length != length) ++item;
  if (item == items.end() || item->offset != offset) return {};
  return {{file->second.blocks.data() + item->first, num_blocks(length, block_)}, block_};
}

bool Checksums::match(const std::string& file, const std::string& content) const {
  const std::vector<uint32_t> found = block_checksums(content, block_);
  const BlockChecksums recorded = find(file, 0, content.size());
  return std::equal(found.begin(), found.end(), recorded.sums.begin(), recorded.sums.end());
}

uint64_t Checksums::file_size(const std::string& name) const {
  const auto file = files_.find(name);
  if (file == files_.end() || file->second.items.empty()) return 0;
  return file->second.items.back().offset + file->second.items.back().length;
}

std::vector<std::string> Checksums::files() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : files_) names.push_back(name);
  return names;
}

std::vector<uint32_t> block_checksums(const std::string& content, uint64_t block) {
  std::vector<uint32_t> blocks;
  for (size_t at = 0; at < content.size(); at += block) {
    blocks.push_back(crc32(0, content.data() + at, std::min<size_t>(block, content.size() - at)));
  }
  return blocks;
}

}  // namespace fsdp2::dcp::detail
