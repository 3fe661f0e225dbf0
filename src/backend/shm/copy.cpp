#include "backend/shm/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fsdp2::detail::shm {

#if defined(__x86_64__)
namespace {

// One store per line keeps the processor from writing a line in parts.
__attribute__((target("avx512f"))) void stream_lines(std::byte* to, const std::byte* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
}

const bool has_avx512 = __builtin_cpu_supports("avx512f") != 0;

}  // namespace
#endif

void copy_bytes(std::byte* to, const std::byte* from, size_t bytes, bool past_cache) {
#if defined(__x86_64__)
  constexpr size_t kLine = 64;
  if (past_cache && bytes >= 2 * kLine) {
    const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, head);
    const size_t end = head + (bytes - head) / kLine * kLine;
    if (has_avx512) stream_lines(to + head, from + head, end - head);
    for (size_t i = has_avx512 ? end : head; i < end; i += kLine) {
      const auto* source = reinterpret_cast<const __m128i*>(from + i);
      auto* target = reinterpret_cast<__m128i*>(to + i);
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
    std::memcpy(to + end, from + end, bytes - end);
    return;
  }
#endif
  (void)past_cache;
  std::memcpy(to, from, bytes);
}

}  // namespace fsdp2::detail::shm
