#include "backend/shm/sum.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/bit_cast.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include <fsdp2/error.h>

#include "backend/shm/copy.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define FSDP2_X86 1
#include <immintrin.h>
#else
#define FSDP2_X86 0
#endif

// Note [Loops for several processors]
// The loops are written once, as functions that are always inlined, and compiled into one function per instruction set;
// the processor chooses at run time. No instruction set fuses a multiplication with an addition here (this file is
// compiled without), so all give the same bits.
#define FSDP2_INLINE inline __attribute__((always_inline))
// Of a loop whose output is one of its inputs, or apart from all of them.
#if defined(__GNUC__) && !defined(__clang__)
#define FSDP2_SAME_OR_APART _Pragma("GCC ivdep")
#else
#define FSDP2_SAME_OR_APART
#endif

namespace fsdp2::detail::shm {

namespace {

constexpr int64_t kBlock = 2048;  // values in the first-level cache

struct Sum {
  void* out;
  at::ScalarType out_dtype;
  c10::ArrayRef<const void*> in;
  at::ScalarType in_dtype;
  int64_t numel;
  double divisor;
  bool past_cache;
};

FSDP2_INLINE void widen(const c10::BFloat16* in, float* out, int64_t n) {
  const auto* bits = reinterpret_cast<const uint16_t*>(in);
  auto* wide = reinterpret_cast<uint32_t*>(out);
  for (int64_t i = 0; i < n; ++i) wide[i] = static_cast<uint32_t>(bits[i]) << 16;
}

FSDP2_INLINE void narrow(const float* in, c10::BFloat16* out, int64_t n) {
  auto* bits = reinterpret_cast<uint16_t*>(out);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t wide = c10::bit_cast<uint32_t>(in[i]);
    const uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;  // to nearest, ties to even
    bits[i] = static_cast<uint16_t>(in[i] != in[i] ? 0x7fc0 : rounded);
  }
}

void widen_one_by_one(const c10::Half* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = in[i];
}

void narrow_one_by_one(const float* in, c10::Half* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = in[i];
}

#if FSDP2_X86
__attribute__((target("avx,f16c"))) void widen_by_eight(const c10::Half* in, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
  widen_one_by_one(in + i, out + i, n - i);
}

__attribute__((target("avx,f16c"))) void narrow_by_eight(const float* in, c10::Half* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  }
  narrow_one_by_one(in + i, out + i, n - i);
}

const bool has_f16c = __builtin_cpu_supports("f16c") != 0 && __builtin_cpu_supports("avx") != 0;
#endif

void widen(const c10::Half* in, float* out, int64_t n) {
#if FSDP2_X86
  if (has_f16c) return widen_by_eight(in, out, n);
#endif
  widen_one_by_one(in, out, n);
}

void narrow(const float* in, c10::Half* out, int64_t n) {
#if FSDP2_X86
  if (has_f16c) return narrow_by_eight(in, out, n);
#endif
  narrow_one_by_one(in, out, n);
}

FSDP2_INLINE void narrow(const float* in, double* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = in[i];
}

FSDP2_INLINE void narrow(const double* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(in[i]);
}

template <class Out>
FSDP2_INLINE void narrow(const double* in, Out* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(in[i]);
}

/// `n` values as the type that is added up: where they are, or converted into `room`.
template <class In, class Acc>
FSDP2_INLINE const Acc* read(const void* in, int64_t begin, int64_t n, Acc* room) {
  const In* values = static_cast<const In*>(in) + begin;
  if constexpr (std::is_same_v<In, Acc>) {
    return values;
  } else {
    widen(values, room, n);
    return room;
  }
}

/// The most frequent case in one pass: two ranks, no conversion.
template <class T>
FSDP2_INLINE void sum_two(const Sum& sum, T divisor, bool exact) {
  const T* const first = static_cast<const T*>(sum.in[0]);
  const T* const second = static_cast<const T*>(sum.in[1]);
  T* const out = static_cast<T*>(sum.out);
  const T factor = T(1) / divisor;
  if (exact) {
    FSDP2_SAME_OR_APART
    for (int64_t i = 0; i < sum.numel; ++i) out[i] = (first[i] + second[i]) * factor;
  } else {
    FSDP2_SAME_OR_APART
    for (int64_t i = 0; i < sum.numel; ++i) out[i] = (first[i] + second[i]) / divisor;
  }
}

template <class In, class Acc, class Out>
FSDP2_INLINE void sum_as(const Sum& sum) {
  alignas(64) std::array<Acc, kBlock> total, first_room, room;
  alignas(64) std::array<Out, std::is_same_v<Out, Acc> ? 1 : kBlock> narrow_room;
  const auto divisor = static_cast<Acc>(sum.divisor);
  int exponent = 0;
  const bool exact = std::frexp(divisor, &exponent) == Acc(0.5);  // its inverse is exact too
  const Acc factor = Acc(1) / divisor;
  if constexpr (std::is_same_v<In, Acc> && std::is_same_v<Out, Acc>) {
    if (sum.in.size() == 2 && !sum.past_cache) return sum_two<Acc>(sum, divisor, exact);
  }
  for (int64_t begin = 0; begin < sum.numel; begin += kBlock) {
    const int64_t n = std::min(kBlock, sum.numel - begin);
    const Acc* first = read<In, Acc>(sum.in[0], begin, n, first_room.data());
    if (sum.in.size() == 1) {
      for (int64_t i = 0; i < n; ++i) total[i] = first[i];
    } else {
      const Acc* second = read<In, Acc>(sum.in[1], begin, n, room.data());
      for (int64_t i = 0; i < n; ++i) total[i] = first[i] + second[i];
    }
    for (size_t k = 2; k < sum.in.size(); ++k) {
      const Acc* next = read<In, Acc>(sum.in[k], begin, n, room.data());
      for (int64_t i = 0; i < n; ++i) total[i] += next[i];
    }
    if (divisor != Acc(1)) {
      if (exact) {
        for (int64_t i = 0; i < n; ++i) total[i] *= factor;
      } else {
        for (int64_t i = 0; i < n; ++i) total[i] /= divisor;
      }
    }
    Out* const out = static_cast<Out*>(sum.out) + begin;
    if (sum.past_cache) {
      const void* result = total.data();
      if constexpr (!std::is_same_v<Out, Acc>) {
        narrow(total.data(), narrow_room.data(), n);
        result = narrow_room.data();
      }
      copy_bytes(reinterpret_cast<std::byte*>(out), static_cast<const std::byte*>(result),
                 static_cast<size_t>(n) * sizeof(Out), true);
    } else if constexpr (std::is_same_v<Out, Acc>) {
      for (int64_t i = 0; i < n; ++i) out[i] = total[i];
    } else {
      narrow(total.data(), out, n);
    }
  }
}

[[noreturn]] void refuse(at::ScalarType dtype) {
  FSDP2_THROW(kUnsupported, "[shm] sums of ", dtype,
              " are not offered here; allowed are Float, Double, BFloat16 and Half");
}

template <class In, class Acc>
FSDP2_INLINE void sum_from(const Sum& sum) {
  switch (sum.out_dtype) {
    case at::kFloat:
      return sum_as<In, Acc, float>(sum);
    case at::kDouble:
      return sum_as<In, Acc, double>(sum);
    case at::kBFloat16:
      return sum_as<In, Acc, c10::BFloat16>(sum);
    case at::kHalf:
      return sum_as<In, Acc, c10::Half>(sum);
    default:
      refuse(sum.out_dtype);
  }
}

FSDP2_INLINE void sum_any(const Sum& sum) {
  switch (sum.in_dtype) {
    case at::kFloat:
      return sum_from<float, float>(sum);
    case at::kDouble:
      return sum_from<double, double>(sum);
    case at::kBFloat16:
      return sum_from<c10::BFloat16, float>(sum);
    case at::kHalf:
      return sum_from<c10::Half, float>(sum);
    default:
      refuse(sum.in_dtype);
  }
}

void sum_generic(const Sum& sum) { sum_any(sum); }

#if FSDP2_X86
__attribute__((target("avx2"))) void sum_avx2(const Sum& sum) { sum_any(sum); }
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void sum_avx512(const Sum& sum) {
  sum_any(sum);
}
#endif

using SumFunction = void (*)(const Sum&);

SumFunction choose() {
#if FSDP2_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return sum_avx512;
  }
  if (__builtin_cpu_supports("avx2")) return sum_avx2;
#endif
  return sum_generic;
}

}  // namespace

void sum_in_order(void* out, at::ScalarType out_dtype, c10::ArrayRef<const void*> in, at::ScalarType in_dtype,
                  int64_t numel, double divisor) {
  sum_in_order(out, out_dtype, in, in_dtype, numel, divisor, false);
}

void sum_in_order(void* out, at::ScalarType out_dtype, c10::ArrayRef<const void*> in, at::ScalarType in_dtype,
                  int64_t numel, double divisor, bool past_cache) {
  FSDP2_CHECK(!in.empty(), kInvalidArgument, "[shm] a sum of nothing");
  static const SumFunction function = choose();
  function({out, out_dtype, in, in_dtype, numel, divisor, past_cache});
}

}  // namespace fsdp2::detail::shm
