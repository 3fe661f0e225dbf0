#pragma once

#include <cstddef>

namespace fsdp2::detail::shm {

/// memcpy; where `past_cache`, what is written goes to memory without first being read into the cache.
void copy_bytes(std::byte* to, const std::byte* from, size_t bytes, bool past_cache);

}  // namespace fsdp2::detail::shm
