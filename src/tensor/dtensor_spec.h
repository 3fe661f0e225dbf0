#pragma once

// What makes a Tensor a DTensor. See Note [A DTensor is a marked tensor] in dtensor_spec.cpp.

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fsdp2/device_mesh.h>
#include <fsdp2/tensor/placement.h>

namespace fsdp2::detail {

/// The extra key of a DTensor: libtorch registers nothing on it and it sits above autograd.
inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::DeferredInit;

/// A box of a tensor: one (offset, size) pair per dimension.
struct Box {
  std::vector<int64_t> offsets, sizes;
  int64_t numel() const;
  bool operator==(const Box&) const = default;
};

/// Rows [offset, offset + length) of `size` that chunk `index` of `num_chunks` holds, cut like torch.chunk;
/// an empty chunk has offset == size.
struct ChunkRange {
  int64_t offset, length;
};
ChunkRange chunk_range(int64_t size, int64_t num_chunks, int64_t index);

/// Boxes of the global tensor that the rank at `coordinate` of `mesh` holds, in the order in which they lie
/// in its local tensor; empty where it holds nothing. Throws kUnsupported for a layout it cannot describe.
std::vector<Box> chunks_at(at::IntArrayRef sizes, const DeviceMesh& mesh, const std::vector<Placement>& placements,
                           const std::vector<int64_t>& coordinate);
/// Shape of the local tensor of that rank.
std::vector<int64_t> local_shape_at(at::IntArrayRef sizes, const DeviceMesh& mesh,
                                    const std::vector<Placement>& placements, const std::vector<int64_t>& coordinate);

/// Checks one placement per axis and dims in range; negative dims become positive.
std::vector<Placement> normalize_placements(std::vector<Placement> placements, const DeviceMesh& mesh,
                                            int64_t tensor_dims);

/// How a tensor lies on a mesh, without data. Immutable and shared by the tensors that operators make.
struct DTensorLayout {
  DTensorLayout(DeviceMesh mesh, std::vector<Placement> placements, std::vector<int64_t> sizes,
                std::vector<int64_t> extents = {});

  DeviceMesh mesh;
  std::vector<Placement> placements;  // one per mesh axis
  std::vector<int64_t> sizes;         // global
  /// Rows per rank of a 1-D mesh, where from_local met parts that are not cut like torch.chunk; else empty.
  std::vector<int64_t> extents;
  bool partial;  // any placement is Partial

  bool equals(const DTensorLayout& other) const;
  std::vector<Box> chunks(const std::vector<int64_t>& coordinate) const;
  std::vector<int64_t> local_shape(const std::vector<int64_t>& coordinate) const;
  /// Axes along which the ranks hold different parts.
  std::vector<int64_t> sharded_axes() const;
};

/// A name that every result of an operator carries on: a copy counts instead of allocating.
class SharedName {
 public:
  SharedName(std::string text = {})
      : text_(text.empty() ? nullptr : std::make_shared<const std::string>(std::move(text))) {}
  SharedName(const char* text) : SharedName(std::string(text)) {}
  operator const std::string&() const { return text(); }
  const std::string& text() const {
    static const std::string none;
    return text_ == nullptr ? none : *text_;
  }
  bool empty() const { return text_ == nullptr; }

 private:
  std::shared_ptr<const std::string> text_;
};

/// Layout plus this rank's data; hangs on the TensorImpl as its backend meta. Immutable but for `local`
/// and `fqn`; tensors that alias each other (detach, .data()) share it or hold an equal one with the same `local`.
struct DTensorSpec : c10::BackendMeta {
  DTensorSpec(DeviceMesh mesh, std::vector<Placement> placements, std::vector<int64_t> sizes, Tensor local,
              std::string fqn);
  DTensorSpec(std::shared_ptr<const DTensorLayout> layout, Tensor local, SharedName fqn);
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& self) const override {
    return self;
  }

  const std::shared_ptr<const DTensorLayout> layout;
  const DeviceMesh& mesh;                    // of the layout
  const std::vector<Placement>& placements;  // one per mesh axis
  const std::vector<int64_t>& sizes;         // global
  Tensor local;                              // plain, no DTensor key, never requires grad
  SharedName fqn;                            // of the parameter, for messages; may be empty

  bool has_partial() const { return layout->partial; }
  bool same_layout(const DTensorSpec& other) const;  // mesh, placements and sizes
  std::vector<Box> local_chunks() const;             // chunks_at this rank's coordinate
};

/// O(1): carries the key.
inline bool is_marked(const Tensor& tensor) { return tensor.defined() && tensor.key_set().has(kDTensorKey); }
/// Null if `tensor` is not a DTensor. A marked tensor without a spec is our own bug and throws.
DTensorSpec* spec_of(const Tensor& tensor);
/// The plain local part; throws kInvalidArgument if `tensor` is not a DTensor.
const Tensor& local_of(const Tensor& tensor);

/// A new marked tensor over `local` (same dtype and device; no autograd).
Tensor make_dtensor(Tensor local, DeviceMesh mesh, std::vector<Placement> placements, std::vector<int64_t> sizes,
                    std::string fqn = {});
/// The same layout and fqn over other local data (same shape; dtype and device may differ).
Tensor make_dtensor_like(const DTensorSpec& layout, Tensor local);
/// The same for results of operators: `local` is known to be plain and to fit, and the text for storage access is
/// libtorch's, which costs less.
Tensor make_dtensor_result(const DTensorSpec& like, Tensor local);
Tensor make_dtensor_over(std::shared_ptr<const DTensorLayout> layout, Tensor local, SharedName fqn);
/// Another tensor over the same spec (what detach() and .data() give).
Tensor make_dtensor_alias(const Tensor& marked);

/// This rank's position; kUsage where it is not in the mesh.
std::vector<int64_t> coordinate_of_this_rank(const DeviceMesh& mesh);

/// "'fc.weight' (DTensor [17, 5], [Shard(0)])" for messages.
std::string describe(const DTensorSpec& spec);

/// With InferenceMode on, new tensors could never take part in training afterwards.
struct LeaveInferenceMode {
  LeaveInferenceMode() {
    if (c10::InferenceMode::is_enabled()) off.emplace(false);
  }
  std::optional<c10::InferenceMode> off;
};

/// Library code that touches locals or swaps data runs under this guard: operators inside bypass the DTensor fallback.
struct BelowDTensor {
  c10::impl::ExcludeDispatchKeyGuard guard{kDTensorKey};
};

}  // namespace fsdp2::detail
