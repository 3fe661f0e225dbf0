#include "training/gradient_kernels.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/TensorBody.h>

#include <algorithm>
#include <array>
#include <cstdint>

// Built for several instruction sets, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FSDP2_WIDE __attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default")))
#else
#define FSDP2_WIDE
#endif
#define FSDP2_INLINE inline __attribute__((always_inline))

namespace fsdp2::detail {
namespace {

using at::Tensor;

/// A piece of a tensor that one thread works on; of a size of its own, so that sums are always cut alike.
struct Piece {
  void* data;
  int64_t numel;
  at::ScalarType dtype;
};
constexpr int64_t kPieceNumel = 32768;

template <class GetData>
std::vector<Piece> cut(const std::vector<Tensor>& tensors, GetData&& data_of) {
  std::vector<Piece> pieces;
  pieces.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    auto* data = static_cast<char*>(data_of(tensor));
    const int64_t numel = tensor.numel();
    for (int64_t begin = 0; begin < numel; begin += kPieceNumel) {
      pieces.push_back({data + begin * static_cast<int64_t>(tensor.element_size()),
                        std::min(kPieceNumel, numel - begin), tensor.scalar_type()});
    }
  }
  return pieces;
}

template <class Visit>
void for_each_piece(const std::vector<Piece>& pieces, Visit&& visit) {
  at::parallel_for(0, static_cast<int64_t>(pieces.size()), /*grain_size=*/4, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) visit(index, pieces[static_cast<size_t>(index)]);
  });
}

// A sum for each lane, so that the compiler may use wide registers without changing the order of additions.
constexpr int64_t kLanes = 32;

template <class Value>
FSDP2_INLINE double squares(const Value* data, int64_t numel) {
  std::array<double, kLanes> lanes{};
  int64_t index = 0;
  for (; index + kLanes <= numel; index += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const auto value = static_cast<double>(static_cast<at::opmath_type<Value>>(data[index + lane]));
      lanes[static_cast<size_t>(lane)] += value * value;
    }
  }
  for (; index < numel; ++index) {
    const auto value = static_cast<double>(static_cast<at::opmath_type<Value>>(data[index]));
    lanes[0] += value * value;
  }
  double total = 0;
  for (const double lane : lanes) total += lane;
  return total;
}

template <class Value>
FSDP2_INLINE void scale_values(Value* data, int64_t numel, double scale) {
  using Wide = at::opmath_type<Value>;
  const auto factor = static_cast<Wide>(scale);
  for (int64_t index = 0; index < numel; ++index) {
    data[index] = static_cast<Value>(static_cast<Wide>(data[index]) * factor);
  }
}

// One function per dtype, since clones cannot be templates.
FSDP2_WIDE double squares_float(const float* data, int64_t numel) { return squares(data, numel); }
FSDP2_WIDE double squares_double(const double* data, int64_t numel) { return squares(data, numel); }
FSDP2_WIDE double squares_bfloat16(const at::BFloat16* data, int64_t numel) { return squares(data, numel); }
FSDP2_WIDE void scale_float(float* data, int64_t numel, double scale) { scale_values(data, numel, scale); }
FSDP2_WIDE void scale_double(double* data, int64_t numel, double scale) { scale_values(data, numel, scale); }
FSDP2_WIDE void scale_bfloat16(at::BFloat16* data, int64_t numel, double scale) { scale_values(data, numel, scale); }

double squares_of(const Piece& piece) {
  if (piece.dtype == at::kFloat) return squares_float(static_cast<const float*>(piece.data), piece.numel);
  if (piece.dtype == at::kDouble) return squares_double(static_cast<const double*>(piece.data), piece.numel);
  return squares_bfloat16(static_cast<const at::BFloat16*>(piece.data), piece.numel);
}

void scale_piece(const Piece& piece, double scale) {
  if (piece.dtype == at::kFloat) return scale_float(static_cast<float*>(piece.data), piece.numel, scale);
  if (piece.dtype == at::kDouble) return scale_double(static_cast<double*>(piece.data), piece.numel, scale);
  return scale_bfloat16(static_cast<at::BFloat16*>(piece.data), piece.numel, scale);
}

}  // namespace

bool has_gradient_kernels(const Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
         (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16) &&
         tensor.is_non_overlapping_and_dense();
}

double sum_of_squares(const std::vector<Tensor>& tensors) {
  const auto pieces = cut(tensors, [](const Tensor& tensor) { return const_cast<void*>(tensor.const_data_ptr()); });
  std::vector<double> sums(pieces.size());
  for_each_piece(pieces,
                 [&](int64_t index, const Piece& piece) { sums[static_cast<size_t>(index)] = squares_of(piece); });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

void scale_gradients(const std::vector<Tensor>& tensors, double scale) {
  for (const Tensor& tensor : tensors) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
  const auto pieces = cut(tensors, [](const Tensor& tensor) { return tensor.mutable_data_ptr(); });
  for_each_piece(pieces, [&](int64_t, const Piece& piece) { scale_piece(piece, scale); });
}

std::vector<std::vector<Tensor>> by_device_and_dtype(const std::vector<Tensor>& tensors) {
  std::vector<std::vector<Tensor>> lists;
  for (const Tensor& tensor : tensors) {
    auto list = std::find_if(lists.begin(), lists.end(), [&](const std::vector<Tensor>& other) {
      return other[0].device() == tensor.device() && other[0].scalar_type() == tensor.scalar_type();
    });
    if (list == lists.end()) list = lists.emplace(lists.end());
    list->push_back(tensor);
  }
  return lists;
}

}  // namespace fsdp2::detail
