#pragma once

// Items that went through a stream transform, which is compression with zstd in every checkpoint that is known.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dcp/byte_range.h"
#include "dcp/byte_sink.h"

namespace fsdp2::dcp::detail {

/// How Python names it: the version after the slash; 1 and 1.x are the same format.
inline constexpr const char* kZstdTransform = "stream.zstd/1";

/// The most that an archive needs beside the bytes of its tensor: names, pickle, padding, directory.
inline constexpr uint64_t kArchiveOverhead = uint64_t{1} << 20;

/// The most that `length` bytes of an item can become: the ratio that zstd cannot exceed, or `length` itself.
uint64_t most_undone_bytes(uint64_t length, const std::vector<std::string>& transforms);
/// What a value, whose size nothing tells, may become.
uint64_t most_value_bytes(uint64_t length, const std::vector<std::string>& transforms);

/// The item as it was before `transforms` (the last one first, at least one), in memory, which grows with what comes
/// out and ends at `most` bytes. kUnsupported naming a transform that is not known; kCorruption: cut, damaged, bigger
/// than `most`.
ByteRange undo_transforms(const ByteRange& stored, const std::vector<std::string>& transforms, uint64_t most);

/// Compresses what is written to it into one zstd frame.
class ZstdSink final : public ByteSink {
 public:
  explicit ZstdSink(ByteSink& out);
  ~ZstdSink() override;

  uint32_t write(const void* data, size_t size) override;
  /// Counts what goes in.
  uint64_t position() const override { return position_; }
  /// Ends the frame. Without it what was written is not readable.
  void finish();

 private:
  void compress(const void* data, size_t size, bool last);

  struct Context;
  std::unique_ptr<Context> context_;
  ByteSink& out_;
  uint64_t position_ = 0;
};

}  // namespace fsdp2::dcp::detail
