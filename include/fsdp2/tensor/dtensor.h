#pragma once

// Distributed tensors. Python twin: torch.distributed.tensor.

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include <fsdp2/device_mesh.h>
#include <fsdp2/export.h>
#include <fsdp2/module_ref.h>
#include <fsdp2/tensor/placement.h>

namespace fsdp2 {

FSDP2_API bool is_dtensor(const Tensor& tensor);

/// Handle to a Tensor whose sizes are global and whose data is this rank's part of a mesh.
/// Every method that says "collective" must be called by all ranks of the mesh in the same order.
class FSDP2_API DTensor {
 public:
  /// kInvalidArgument if `tensor` is not distributed.
  explicit DTensor(Tensor tensor);

  const DeviceMesh& device_mesh() const;
  const std::vector<Placement>& placements() const;
  // Global geometry.
  at::IntArrayRef sizes() const { return tensor_.sizes(); }
  at::IntArrayRef strides() const { return tensor_.strides(); }
  int64_t numel() const { return tensor_.numel(); }
  int64_t size(int64_t dim) const { return tensor_.size(dim); }

  /// This rank's plain part; shares storage. Differentiable: its gradient is taken as this rank's part.
  Tensor to_local() const;
  /// Collective: the whole as a plain tensor on every rank. Differentiable: the gradient is taken as
  /// replicated and each rank keeps its own part.
  Tensor full_tensor() const;
  /// Collective. Differentiable.
  DTensor redistribute(std::vector<Placement> placements) const;
  /// The marked tensor itself.
  Tensor tensor() const { return tensor_; }

 private:
  Tensor tensor_;
};

/// Collective; the values of rank 0 of the mesh win. `full` is plain and has the global shape on every rank.
FSDP2_API DTensor distribute_tensor(const Tensor& full, const DeviceMesh& mesh, std::vector<Placement> placements);

/// Wraps this rank's part. Without `sizes`: collective, one small all-gather of the shapes (uneven parts allowed;
/// parts that cannot be the chunks of one tensor are kInvalidArgument naming the ranks). Differentiable.
FSDP2_API DTensor from_local(const Tensor& local, const DeviceMesh& mesh, std::vector<Placement> placements,
                             std::optional<std::vector<int64_t>> sizes = {});

/// Makes the parameter named `fqn` a DTensor in place: same TensorImpl, so members and optimizers keep it. Collective.
FSDP2_API void distribute_parameter(ModuleRef module, const std::string& fqn, const DeviceMesh& mesh,
                                    std::vector<Placement> placements);

}  // namespace fsdp2
