#include "dcp/file_writer.h"

#include <algorithm>

#include "dcp/crc32.h"

namespace fsdp2::dcp::detail {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;
constexpr size_t kSmall = size_t{4} << 10;  // cheaper to sum twice than to join

}  // namespace

FileWriter::FileWriter(std::unique_ptr<OutputFile> file, bool checksums, std::atomic<uint64_t>* progress)
    : file_(std::move(file)), checksums_(checksums), progress_(progress) {
  buffer_.reserve(kBufferBytes);
}

/// Adds bytes that end within the present block to its checksum; returns their own.
uint32_t FileWriter::sum(const char* data, size_t size) {
  const uint32_t own = crc32(0, data, size);
  if (in_block_ == 0) {
    block_ = own;
  } else {
    block_ = size < kSmall ? crc32(block_, data, size) : joined_crc32(block_, own, size);
  }
  in_block_ += size;
  if (in_block_ == kChecksumBlock) {
    blocks_.push_back(block_);
    in_block_ = 0;
  }
  return own;
}

void FileWriter::flush() {
  if (!buffer_.empty()) file_->write(buffer_.data(), buffer_.size());
  buffer_.clear();
}

void FileWriter::put(const char* data, size_t size) {
  if (buffer_.size() + size > kBufferBytes || size >= kChecksumBlock / 2) flush();
  if (size >= kChecksumBlock / 2) {
    file_->write(data, size);
  } else {
    buffer_.insert(buffer_.end(), data, data + size);
  }
}

uint32_t FileWriter::write(const void* data, size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  uint32_t all = 0;
  for (size_t done = 0; done < size;) {
    const size_t part = std::min(size - done, kChecksumBlock - in_block_);
    put(bytes + done, part);  // first: it leaves the bytes in the cache
    if (checksums_) {
      const uint32_t own = sum(bytes + done, part);
      all = done == 0 ? own : joined_crc32(all, own, part);
    }
    done += part;
    position_ += part;
    if (progress_ != nullptr) progress_->fetch_add(part, std::memory_order_relaxed);
  }
  return all;
}

void FileWriter::begin_item() {
  blocks_.clear();
  in_block_ = 0;
}

std::vector<uint32_t> FileWriter::end_item() {
  if (in_block_ > 0) blocks_.push_back(block_);
  in_block_ = 0;
  return std::move(blocks_);
}

void FileWriter::finish() {
  flush();
  file_->finish();
}

}  // namespace fsdp2::dcp::detail
