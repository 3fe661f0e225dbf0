#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp2::dcp::detail {

/// Bytes that go somewhere in order.
class ByteSink {
 public:
  virtual ~ByteSink() = default;
  /// Returns the CRC-32 of these bytes (0 where none is wanted).
  virtual uint32_t write(const void* data, size_t size) = 0;
  /// Bytes written so far.
  virtual uint64_t position() const = 0;
};

}  // namespace fsdp2::dcp::detail
