#include "dcp/byte_range.h"

#include <fsdp2/error.h>

#include <algorithm>
#include <cstring>

#include "dcp/crc32.h"
#include "dcp/file_writer.h"

namespace fsdp2::dcp::detail {
namespace {

constexpr uint64_t kSmallItem = uint64_t{64} << 10;

}  // namespace

ByteRange::ByteRange(std::shared_ptr<const InputFile> file, uint64_t base, uint64_t length, const std::string& key,
                     std::span<const uint32_t> checksums)
    : file_(std::move(file)),
      base_(base),
      length_(length),
      what_(file_->name() + " (" + key + ")"),
      checksums_(checksums) {
  FSDP2_CHECK(base <= file_->size() && length <= file_->size() - base, kCorruption, "[dcp] ", what_,
              ": the metadata say ", length, " bytes at offset ", base, ", the file has ", file_->size(),
              "; it was cut or belongs to another checkpoint");
  if (length <= kSmallItem && length > 0) {
    cache_.resize(static_cast<size_t>(length));
    file_->read(base, cache_.data(), cache_.size());
    if (is_checked()) check_block(0, cache_.data(), cache_.size());
  }
}

ByteRange::ByteRange(std::string content, std::string what)
    : length_(content.size()), what_(std::move(what)), cache_(std::move(content)) {}

void ByteRange::check_bounds(uint64_t offset, uint64_t size) const {
  FSDP2_CHECK(offset <= length_ && size <= length_ - offset, kCorruption, "[dcp] ", what_, ": wanted are ", size,
              " bytes at offset ", offset, " of an item of ", length_);
}

void ByteRange::check_block(uint64_t block, const char* data, size_t size) const {
  const uint32_t found = crc32(0, data, size), recorded = checksums_[static_cast<size_t>(block)];
  FSDP2_CHECK(found == recorded, kCorruption, "[dcp] ", what_, ": the ", size, " bytes at offset ",
              base_ + block * kChecksumBlock, " of the file have the checksum ", found, ", recorded is ", recorded,
              "; the data were changed after saving");
}

void ByteRange::read_checked(uint64_t offset, char* out, size_t size) const {
  while (size > 0) {
    const uint64_t block = offset / kChecksumBlock, start = block * kChecksumBlock;
    const auto in_block = static_cast<size_t>(std::min<uint64_t>(kChecksumBlock, length_ - start));
    const auto skip = static_cast<size_t>(offset - start);
    const size_t part = std::min(size, in_block - skip);
    if (part == in_block) {
      file_->read(base_ + start, out, part);
      check_block(block, out, part);
    } else {
      if (cache_.size() != in_block || cached_at_ != start) {
        cache_.resize(in_block);
        cached_at_ = UINT64_MAX;  // nothing, should reading fail
        file_->read(base_ + start, cache_.data(), in_block);
        check_block(block, cache_.data(), in_block);
        cached_at_ = start;
      }
      std::memcpy(out, cache_.data() + skip, part);
    }
    out += part;
    offset += part;
    size -= part;
  }
}

void ByteRange::read(uint64_t offset, void* out, size_t size) const {
  check_bounds(offset, size);
  if (size == 0) return;
  if (!file_ || length_ <= kSmallItem) {
    std::memcpy(out, cache_.data() + offset, size);
  } else if (is_checked()) {
    read_checked(offset, static_cast<char*>(out), size);
  } else {
    file_->read(base_ + offset, out, size);
  }
}

std::string ByteRange::read_text(uint64_t offset, size_t size) const {
  check_bounds(offset, size);
  std::string result(size, '\0');
  read(offset, result.data(), size);
  return result;
}

}  // namespace fsdp2::dcp::detail
