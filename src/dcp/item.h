#pragma once

// One saved item: a complete torch.save archive that holds a tensor or a plain value.

#include <ATen/core/Tensor.h>
#include <fsdp2/dcp/value.h>

#include <cstdint>
#include <string>
#include <vector>

#include "dcp/zip_archive.h"

namespace fsdp2::dcp::detail {

inline constexpr int kMaxDepth = 200;                      // of lists and dicts in each other
inline constexpr size_t kMaxValueBytes = size_t{1} << 30;  // of a plain value's pickle

/// Plain, dense, on CPU, without conj or neg bit, contiguous: what the writer stores. kUnsupported
/// for tensors that a checkpoint cannot hold (sparse, quantized, meta, nested), naming `fqn`.
at::Tensor storable(const at::Tensor& tensor, const std::string& fqn);
/// Throws where storable() would.
void check_storable(const at::Tensor& tensor, const std::string& fqn);

/// Writes a tensor made by storable().
void write_tensor_item(ByteSink& out, const at::Tensor& tensor);

/// The same in pieces, for tensors that are not in memory as a whole: row-major elements, one after the other.
class TensorItemWriter {
 public:
  TensorItemWriter(ByteSink& out, at::ScalarType dtype, const std::vector<int64_t>& sizes);
  void write(const void* data, size_t size) { archive_.append(data, size); }
  void finish();

 private:
  ZipWriter archive_;
};

/// A plain value, pickled; `tensors` inside of it go to records of their own.
struct PickledValue {
  std::string pickle;
  std::vector<at::Tensor> tensors;
  bool raw = false;  // `pickle` is a whole archive (Kind::Opaque)
};
PickledValue pickle_value(const Value& value, const std::string& fqn);
void write_value_item(ByteSink& out, const PickledValue& value);

/// The value of an item; Kind::Opaque (the item's bytes) where it refers to classes that are not
/// plain data.
Value read_value_item(const ByteRange& bytes, bool verify);

}  // namespace fsdp2::dcp::detail
