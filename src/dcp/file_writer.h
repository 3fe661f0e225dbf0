#pragma once

// A file of a checkpoint while it is written: buffered, and with the checksums of its items.

#include <fsdp2/dcp/storage.h>

#include <atomic>
#include <memory>
#include <vector>

#include "dcp/byte_sink.h"

namespace fsdp2::dcp::detail {

/// What one checksum of the sidecar covers: small enough to stay in a core's cache between the checksum and the copy.
inline constexpr size_t kChecksumBlock = size_t{64} << 10;

class FileWriter final : public ByteSink {
 public:
  /// `progress` counts bytes; may be null.
  FileWriter(std::unique_ptr<OutputFile> file, bool checksums, std::atomic<uint64_t>* progress = nullptr);

  uint32_t write(const void* data, size_t size) override;
  uint64_t position() const override { return position_; }
  /// An item begins here.
  void begin_item();
  /// CRC-32 of the blocks of kChecksumBlock bytes of the item that ends here; the last one may be shorter.
  std::vector<uint32_t> end_item();
  /// Everything is durable when this returns.
  void finish();

 private:
  uint32_t sum(const char* data, size_t size);
  void put(const char* data, size_t size);
  void flush();

  std::unique_ptr<OutputFile> file_;
  bool checksums_;
  std::atomic<uint64_t>* progress_;
  uint64_t position_ = 0;
  std::vector<char> buffer_;
  std::vector<uint32_t> blocks_;  // of the present item
  uint32_t block_ = 0;
  size_t in_block_ = 0;
};

}  // namespace fsdp2::dcp::detail
