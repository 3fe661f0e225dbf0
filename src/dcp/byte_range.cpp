#include "dcp/byte_range.h"

#include <fsdp2/error.h>

#include <algorithm>
#include <cstring>

#include "dcp/crc32.h"

namespace fsdp2::dcp::detail {
namespace {

constexpr uint64_t kUncheckedBlock = uint64_t{4} << 10;

}  // namespace

ByteRange::ByteRange(std::shared_ptr<const InputFile> file, uint64_t base, uint64_t length, const std::string& key,
                     BlockChecksums checksums)
    : file_(std::move(file)),
      base_(base),
      length_(length),
      what_(file_->name() + " (" + key + ")"),
      checksums_(checksums),
      block_(is_checked() ? checksums.block : kUncheckedBlock) {
  FSDP2_CHECK(base <= file_->size() && length <= file_->size() - base, kCorruption, "[dcp] ", what_,
              ": the metadata say ", length, " bytes at offset ", base, ", the file has ", file_->size(),
              "; it was cut or belongs to another checkpoint");
}

ByteRange::ByteRange(std::string content, std::string what)
    : length_(content.size()), what_(std::move(what)), content_(std::move(content)) {}

void ByteRange::check_bounds(uint64_t offset, uint64_t size) const {
  FSDP2_CHECK(offset <= length_ && size <= length_ - offset, kCorruption, "[dcp] ", what_, ": wanted are ", size,
              " bytes at offset ", offset, " of an item of ", length_);
}

/// The whole block that begins there.
void ByteRange::read_block(uint64_t start, char* out, size_t size) const {
  file_->read(base_ + start, out, size);
  if (!is_checked()) return;
  const uint32_t found = crc32(0, out, size), recorded = checksums_.sums[static_cast<size_t>(start / block_)];
  FSDP2_CHECK(found == recorded, kCorruption, "[dcp] ", what_, ": the ", size, " bytes at offset ", base_ + start,
              " of the file have the checksum ", found, ", recorded is ", recorded,
              "; the data were changed after saving");
}

void ByteRange::read_blocks(uint64_t offset, char* out, size_t size) const {
  while (size > 0) {
    const uint64_t start = offset / block_ * block_;
    const auto in_block = static_cast<size_t>(std::min(block_, length_ - start));
    const auto skip = static_cast<size_t>(offset - start);
    const size_t part = std::min(size, in_block - skip);
    if (part == in_block) {
      read_block(start, out, part);
    } else {
      if (cached_at_ != start) {
        if (!cache_) cache_ = std::make_unique_for_overwrite<char[]>(static_cast<size_t>(std::min(block_, length_)));
        cached_at_ = UINT64_MAX;  // nothing, should reading fail
        read_block(start, cache_.get(), in_block);
        cached_at_ = start;
      }
      std::memcpy(out, cache_.get() + skip, part);
    }
    out += part;
    offset += part;
    size -= part;
  }
}

void ByteRange::read(uint64_t offset, void* out, size_t size) const {
  check_bounds(offset, size);
  if (size == 0) return;
  if (!file_) {
    std::memcpy(out, content_.data() + offset, size);
  } else if (is_checked() || size < kUncheckedBlock) {
    read_blocks(offset, static_cast<char*>(out), size);
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
