#include "backend/shm/reduce.h"

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <cmath>
#include <type_traits>

#include <fsdp2/error.h>

#include "backend/shm/sum.h"

namespace fsdp2::detail::shm {

namespace {

using Op = c10d::ReduceOp;

template <class T>
constexpr bool is_small_float = std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>;
template <class T>
using Wide = std::conditional_t<is_small_float<T>, float, T>;

// Integers wrap around.
template <class T>
T plus(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}

template <class T>
T times(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

// Not-a-number wins, as in torch.
template <class T>
T smaller(T a, T b) {
  return a < b || a != a ? a : b;
}

template <class T>
T larger(T a, T b) {
  return a > b || a != a ? a : b;
}

template <class T, class Combine>
void fold(void* out, c10::ArrayRef<const void*> in, size_t bytes, c10::ArrayRef<double> factors,
          const Combine& combine) {
  using W = Wide<T>;
  constexpr size_t kBlock = 1024;
  std::array<W, kBlock> total;
  const size_t numel = bytes / sizeof(T);
  const auto value = [&](size_t rank, size_t i) {
    const W wide = static_cast<W>(static_cast<const T*>(in[rank])[i]);
    return factors.empty() ? wide : times(wide, static_cast<W>(factors[rank]));
  };
  for (size_t begin = 0; begin < numel; begin += kBlock) {
    const size_t n = std::min(kBlock, numel - begin);
    for (size_t i = 0; i < n; ++i) total[i] = value(0, begin + i);
    for (size_t rank = 1; rank < in.size(); ++rank) {
      for (size_t i = 0; i < n; ++i) total[i] = combine(total[i], value(rank, begin + i));
    }
    for (size_t i = 0; i < n; ++i) static_cast<T*>(out)[begin + i] = static_cast<T>(total[i]);
  }
}

[[noreturn]] void refuse(Op::RedOpType op, at::ScalarType dtype) {
  FSDP2_THROW(kUnsupported, "[shm] ", name_of(op), " of ", dtype,
              " is not offered; SUM, PRODUCT, MIN and MAX take integers and floating-point numbers of 16 to 64 bits "
              "(Bool: as or, and), AVG and PREMUL_SUM floating-point ones, BAND, BOR and BXOR integers, and SUM, AVG "
              "and PREMUL_SUM also complex ones");
}

template <class T>
void reduce_as(const Reduction& reduction, void* out, c10::ArrayRef<const void*> in, size_t bytes) {
  using W = Wide<T>;
  const auto run = [&](const auto& combine) { fold<T>(out, in, bytes, {}, combine); };
  switch (reduction.op) {
    case Op::SUM:
      return run(plus<W>);
    case Op::PRODUCT:
      return run(times<W>);
    case Op::MIN:
      return run(smaller<W>);
    case Op::MAX:
      return run(larger<W>);
    case Op::PREMUL_SUM:
      return fold<T>(out, in, bytes, reduction.factors, plus<W>);
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (reduction.op) {
      case Op::BAND:
        return run([](T a, T b) { return static_cast<T>(a & b); });
      case Op::BOR:
        return run([](T a, T b) { return static_cast<T>(a | b); });
      case Op::BXOR:
        return run([](T a, T b) { return static_cast<T>(a ^ b); });
      default:
        break;
    }
  }
  refuse(reduction.op, reduction.dtype);
}

bool is_added_up_in_sum(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
}

Op::RedOpType op_of_bool(Op::RedOpType op) {
  switch (op) {
    case Op::SUM:
    case Op::MAX:
      return Op::BOR;
    case Op::PRODUCT:
    case Op::MIN:
      return Op::BAND;
    default:
      return op;
  }
}

}  // namespace

const char* name_of(Op::RedOpType op) {
  static constexpr std::array<const char*, 9> kNames = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                                        "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  return op < kNames.size() ? kNames[op] : "an unknown operation";
}

void check_can_reduce(Op::RedOpType op, at::ScalarType dtype) {
  bool can = false;
  const bool sums = op == Op::SUM || op == Op::AVG || op == Op::PREMUL_SUM;
  const bool bits = op == Op::BAND || op == Op::BOR || op == Op::BXOR;
  const bool compares = op == Op::PRODUCT || op == Op::MIN || op == Op::MAX;
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
      can = sums || compares;
      break;
    case at::kComplexFloat:
    case at::kComplexDouble:
    case at::kComplexHalf:
      can = sums;
      break;
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kUInt16:
    case at::kUInt32:
    case at::kUInt64:
    case at::kBool:
      can = op == Op::SUM || compares || bits;
      break;
    default:
      break;
  }
  if (!can) refuse(op, dtype);
}

void reduce_in_order(const Reduction& reduction, void* out, c10::ArrayRef<const void*> in, size_t bytes) {
  Reduction real = reduction;
  if (c10::isComplexType(real.dtype)) real.dtype = c10::toRealValueType(real.dtype);
  if (is_added_up_in_sum(real.dtype) && (real.op == Op::SUM || real.op == Op::AVG)) {
    const double divisor = real.op == Op::AVG ? static_cast<double>(in.size()) : 1;
    return sum_in_order(out, real.dtype, in, real.dtype, static_cast<int64_t>(bytes / c10::elementSize(real.dtype)),
                        divisor, real.past_cache);
  }
  switch (real.dtype) {
    case at::kFloat:
      return reduce_as<float>(real, out, in, bytes);
    case at::kDouble:
      return reduce_as<double>(real, out, in, bytes);
    case at::kBFloat16:
      return reduce_as<c10::BFloat16>(real, out, in, bytes);
    case at::kHalf:
      return reduce_as<c10::Half>(real, out, in, bytes);
    case at::kByte:
      return reduce_as<uint8_t>(real, out, in, bytes);
    case at::kChar:
      return reduce_as<int8_t>(real, out, in, bytes);
    case at::kShort:
      return reduce_as<int16_t>(real, out, in, bytes);
    case at::kInt:
      return reduce_as<int32_t>(real, out, in, bytes);
    case at::kLong:
      return reduce_as<int64_t>(real, out, in, bytes);
    case at::kUInt16:
      return reduce_as<uint16_t>(real, out, in, bytes);
    case at::kUInt32:
      return reduce_as<uint32_t>(real, out, in, bytes);
    case at::kUInt64:
      return reduce_as<uint64_t>(real, out, in, bytes);
    case at::kBool:
      real.op = op_of_bool(real.op);
      return reduce_as<uint8_t>(real, out, in, bytes);
    default:
      refuse(reduction.op, reduction.dtype);
  }
}

}  // namespace fsdp2::detail::shm
