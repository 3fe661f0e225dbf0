#pragma once

// A saved tensor: how it lies in its item, and reading parts of it straight to where they belong.

#include <ATen/core/Tensor.h>
#include <fsdp2/dcp/dcp.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "dcp/byte_range.h"
#include "dcp/zip_archive.h"
#include "pickle/graph.h"

namespace fsdp2::dcp::detail {

/// How a tensor lies in a record. Everything was checked against the size of the record.
struct StoredTensor {
  at::ScalarType dtype{};
  std::vector<int64_t> sizes, strides;  // strides are not negative
  int64_t offset = 0;                   // of its first element, in elements
  const ZipReader::Record* record = nullptr;
  bool conj = false, neg = false;  // still to be applied
  bool swapped = false;            // bytes of the other order

  /// One element after the other, as they are in memory.
  bool is_plain() const;
};

bool is_tensor(const pickle::Graph& graph, pickle::Ref ref);

/// Tensors of one archive; those that share a storage share memory.
class TensorReader {
 public:
  TensorReader(const ZipReader& archive, const pickle::Graph& graph);
  /// kCorruption naming the item where the description is impossible.
  StoredTensor describe(pickle::Ref ref) const;
  at::Tensor read(const StoredTensor& stored);

 private:
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const;
  const ZipReader::Record* storage_of(pickle::Ref id, std::optional<at::ScalarType>& type) const;
  void read_flags(pickle::Ref flags, StoredTensor& stored) const;

  const ZipReader& archive_;
  const pickle::Graph& graph_;
  bool swapped_ = false;
  std::unordered_map<const ZipReader::Record*, at::Tensor> storages_;
};

/// The item of one chunk of a tensor, opened but not read.
class TensorItem {
 public:
  /// A torch.save archive that has to hold a tensor of this dtype and shape; kCorruption where it does not.
  TensorItem(ByteRange bytes, bool verify, at::ScalarType dtype, std::vector<int64_t> sizes);
  /// Plain row-major bytes that begin at `begin`.
  TensorItem(ByteRange bytes, uint64_t begin, at::ScalarType dtype, std::vector<int64_t> sizes);

  /// Copies the box `window` of the chunk to `to`, which has its shape and any dtype, strides and device. At most
  /// one slab of rows is held in between, the whole chunk where its strides are not those of rows.
  void copy_window(const Chunk& window, const at::Tensor& to);
  at::Tensor whole();
  /// Reads all of the record once and compares its checksum; copy_window() does not do it again.
  void check();

 private:
  class Pass;
  void copy_rows(Pass& pass, const Chunk& window, size_t dim, int64_t first, const at::Tensor& to);
  at::Tensor read_permuted();

  bool checked_ = false;
  std::unique_ptr<ByteRange> bytes_;  // does not move: the archive refers to it
  std::unique_ptr<ZipReader> archive_;
  StoredTensor stored_;
  uint64_t begin_ = 0;  // without an archive
  at::Tensor permuted_;
};

}  // namespace fsdp2::dcp::detail
