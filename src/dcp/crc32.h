#pragma once

// CRC-32 as zip and zlib define it, many times faster than zlib's own.

#include <isa-l/crc.h>
#include <zlib.h>

#include <cstddef>
#include <cstdint>

namespace fsdp2::dcp::detail {

/// `so_far` is the CRC of what came before, 0 at the start.
inline uint32_t crc32(uint32_t so_far, const void* data, size_t size) {
  return crc32_gzip_refl(so_far, static_cast<const unsigned char*>(data), size);
}

/// The CRC of two pieces put together, without looking at them again.
inline uint32_t joined_crc32(uint32_t first, uint32_t second, uint64_t second_size) {
  return static_cast<uint32_t>(crc32_combine64(first, second, static_cast<z_off64_t>(second_size)));
}

}  // namespace fsdp2::dcp::detail
