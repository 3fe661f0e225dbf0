#include <fsdp2/clip_grad.h>

#include <ATen/Functions.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include <fsdp2/error.h>
#include <fsdp2/process_group.h>

#include "fsdp/ignored_params.h"
#include "process/collectives.h"
#include "tensor/dtensor_spec.h"
#include "tensor/redistribute.h"
#include "training/gradient_kernels.h"

namespace fsdp2 {
namespace {

using detail::DTensorSpec;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// A norm as something that adds up: sum of powers, count, largest or smallest.
class NormSum {
 public:
  explicit NormSum(double order) : order_(order) {}

  double neutral() const { return order_ == -kInfinity ? kInfinity : 0.0; }
  double add(double first, double second) const {
    if (std::isnan(first) || std::isnan(second)) return std::numeric_limits<double>::quiet_NaN();
    if (order_ == kInfinity) return std::max(first, second);
    if (order_ == -kInfinity) return std::min(first, second);
    return first + second;
  }
  double of_norm(double norm) const { return std::isinf(order_) || order_ == 0.0 ? norm : std::pow(norm, order_); }
  double to_norm(double sum) const { return std::isinf(order_) || order_ == 0.0 ? sum : std::pow(sum, 1.0 / order_); }

 private:
  double order_;
};

struct MeshPart {
  DeviceMesh mesh;
  std::vector<const DTensorSpec*> gradients;
  std::vector<int64_t> split_axes;  // along which some gradient is cut; sorted
};

struct Gradients {
  std::vector<MeshPart> meshes;
  std::vector<Tensor> plain;  // counted once, on every rank by itself
  std::vector<Tensor> all;    // locals and plain ones, to be scaled
};

MeshPart& part_of(std::vector<MeshPart>& parts, const DTensorSpec& spec) {
  auto found = std::find_if(parts.begin(), parts.end(), [&](const MeshPart& part) { return part.mesh == spec.mesh; });
  if (found == parts.end()) found = parts.insert(parts.end(), MeshPart{spec.mesh, {}, {}});
  for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
    if (std::holds_alternative<Replicate>(spec.placements[axis])) continue;
    auto& axes = found->split_axes;
    const auto place = std::lower_bound(axes.begin(), axes.end(), static_cast<int64_t>(axis));
    if (place == axes.end() || *place != static_cast<int64_t>(axis)) axes.insert(place, static_cast<int64_t>(axis));
  }
  return *found;
}

void check_no_plain_beside(const std::vector<Tensor>& params, const DTensorSpec* neighbour) {
  if (neighbour == nullptr) return;
  for (size_t position = 0; position < params.size(); ++position) {
    const Tensor& param = params[position];
    if (!param.grad().defined() || detail::is_marked(param) || detail::is_marked(param.grad()) ||
        detail::is_ignored_param(param)) {
      continue;
    }
    FSDP2_THROW(kUsage, "[clip_grad] parameter ", position, " of shape ", param.sizes(),
                " is a plain tensor beside DTensors such as ", detail::describe(*neighbour),
                ": nothing reduces its gradient, so it differs between the ranks; call fully_shard on the module that "
                "owns it (often the root), or list it in ignored_params if it is meant to stay plain");
  }
}

Gradients collect(const std::vector<Tensor>& params) {
  Gradients result;
  const DTensorSpec* neighbour = nullptr;
  ska::flat_hash_set<const c10::TensorImpl*> seen(params.size());
  for (size_t position = 0; position < params.size(); ++position) {
    const Tensor& param = params[position];
    FSDP2_CHECK(param.defined(), kInvalidArgument, "[clip_grad] parameter ", position, " is an empty tensor");
    if (!seen.insert(param.unsafeGetTensorImpl()).second) continue;
    const Tensor& grad = param.grad();
    const auto* spec = detail::spec_of(grad.defined() && detail::is_marked(grad) ? grad : param);
    if (spec != nullptr) {
      FSDP2_CHECK(!spec->has_partial(), kUsage, "[clip_grad] the gradient of ", detail::describe(*spec),
                  " waits for its reduction: call synchronize_gradients() before clipping");
      if (neighbour == nullptr) neighbour = spec;
      auto& part = part_of(result.meshes, *spec);
      if (!grad.defined()) continue;
      FSDP2_CHECK(detail::is_marked(grad), kUsage, "[clip_grad] the gradient of ", detail::describe(*spec),
                  " is a plain tensor of shape ", grad.sizes(), ": it must be a DTensor like its parameter");
      part.gradients.push_back(spec);
      result.all.push_back(spec->local);
    } else if (grad.defined()) {
      Tensor values = grad;
      if (grad.is_sparse()) {
        // Uncoalesced entries of one element would be counted each by itself.
        values = grad.is_coalesced() ? grad : grad.coalesce();
        if (!grad.is_coalesced()) param.mutable_grad() = values;
        values = values._values();
      }
      result.plain.push_back(values);
      result.all.push_back(values);
    }
  }
  check_no_plain_beside(params, neighbour);
  return result;
}

double sum_of(const std::vector<Tensor>& tensors, double order, const NormSum& sum) {
  double total = sum.neutral();
  std::vector<Tensor> direct, others, norms;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    (order == 2.0 && detail::has_gradient_kernels(tensor) ? direct : others).push_back(tensor);
  }
  if (!direct.empty()) total = detail::sum_of_squares(direct);
  for (const auto& list : detail::by_device_and_dtype(others)) {
    const auto dtype = list[0].scalar_type();
    const bool is_short = dtype == at::kHalf || dtype == at::kBFloat16;
    for (const Tensor& norm : at::_foreach_norm(list, order, is_short ? std::optional(at::kFloat) : std::nullopt)) {
      norms.push_back(norm.to(at::kDouble));
    }
  }
  if (norms.empty()) return total;
  const Tensor all = at::stack(norms).cpu();  // one wait for the device
  const auto* values = all.const_data_ptr<double>();
  for (int64_t index = 0; index < all.numel(); ++index) total = sum.add(total, sum.of_norm(values[index]));
  return total;
}

void scale_all(const std::vector<Tensor>& tensors, double scale) {
  std::vector<Tensor> direct, others;
  for (const Tensor& tensor : tensors) (detail::has_gradient_kernels(tensor) ? direct : others).push_back(tensor);
  detail::scale_gradients(direct, scale);
  for (const auto& list : detail::by_device_and_dtype(others)) at::_foreach_mul_(list, scale);
}

/// Ranks of one mesh that saw different sums over other meshes would scale one tensor by different numbers.
void check_same_so_far(const Tensor& so_far, const MeshPart& part) {
  const auto* values = so_far.const_data_ptr<double>();
  for (int64_t rank = 1; rank < so_far.numel(); ++rank) {
    const bool same = std::abs(values[rank] - values[0]) <= 1e-6 * std::abs(values[0]) || values[rank] == values[0] ||
                      (std::isnan(values[rank]) && std::isnan(values[0]));
    FSDP2_CHECK(
        same, kUsage, "[clip_grad] ranks of the mesh of shape ", at::IntArrayRef(part.mesh.shape()),
        " see different sums over the gradients on other meshes (", values[0], " and ", values[rank],
        "): those meshes hold different parameters in different places, e.g. experts, so there is no one total; call "
        "clip_grad_norm_ for the parameters of each mesh by itself");
  }
}

/// The sum over the ranks of the mesh, from one gather, so that every rank adds in the same order. `so_far`: of meshes
/// before, must agree.
double sum_over_mesh(const MeshPart& part, double order, const NormSum& sum, double so_far, bool several_meshes) {
  // Several cut axes need one gather only where the mesh is the whole job, in which order does not matter.
  // Beside other meshes, replicas must agree on those as well.
  const bool all = several_meshes || part.split_axes.size() > 1;
  const bool whole_job = all && part.mesh.size() == get_world_size();
  const auto axes = whole_job || several_meshes ? detail::all_axes(part.mesh) : part.split_axes;
  const auto coordinate = detail::coordinate_of_this_rank(part.mesh);
  std::vector<Tensor> counted;
  for (const auto* spec : part.gradients) {
    // Of the ranks that are asked and hold the same elements, the first one counts them.
    const bool first = std::all_of(axes.begin(), axes.end(), [&](int64_t axis) {
      return !std::holds_alternative<Replicate>(spec->placements[axis]) || coordinate[axis] == 0;
    });
    if (first) counted.push_back(spec->local);
  }
  Tensor mine = at::empty({2}, at::kDouble);
  mine[0] = sum_of(counted, order, sum);
  mine[1] = so_far;
  mine = mine.to(detail::control_device(part.mesh));
  Tensor gathered;
  if (whole_job) {
    gathered = at::empty({part.mesh.size(), 2}, mine.options());
    detail::all_gather(gathered, mine, default_group(), {"clip_grad_norm_"}).wait();
  } else {
    gathered = detail::gather_over_axes(mine, part.mesh, axes, "clip_grad_norm_").reshape({-1, 2});
  }
  gathered = gathered.cpu().t().contiguous();
  check_same_so_far(gathered[1], part);
  double total = sum.neutral();
  for (int64_t index = 0; index < gathered.size(1); ++index) {
    total = sum.add(total, gathered.const_data_ptr<double>()[index]);
  }
  return total;
}

}  // namespace

Tensor clip_grad_norm_(const std::vector<Tensor>& params, double max_norm, double norm_type, bool error_if_nonfinite) {
  FSDP2_CHECK(!std::isnan(max_norm) && max_norm >= 0, kInvalidArgument, "[clip_grad] max_norm is ", max_norm,
              "; it must be 0 or more");
  FSDP2_CHECK(!std::isnan(norm_type), kInvalidArgument, "[clip_grad] norm_type is NaN; any other order is allowed");
  at::NoGradGuard no_grad;
  detail::BelowDTensor below;
  Gradients gradients = collect(params);
  // The largest mesh last: its ranks are those that must have seen the same so far.
  std::stable_sort(gradients.meshes.begin(), gradients.meshes.end(),
                   [](const MeshPart& a, const MeshPart& b) { return a.mesh.size() < b.mesh.size(); });
  const NormSum sum(norm_type);
  double total = sum.neutral();
  for (const auto& part : gradients.meshes) {
    total = sum.add(total, sum_over_mesh(part, norm_type, sum, total, gradients.meshes.size() > 1));
  }
  total = sum.to_norm(sum.add(total, sum_of(gradients.plain, norm_type, sum)));
  FSDP2_CHECK(!error_if_nonfinite || std::isfinite(total), kInvalidArgument, "[clip_grad] the total norm of order ",
              norm_type, " of the gradients is ", total, "; nothing was scaled");

  const bool any_double = std::any_of(gradients.all.begin(), gradients.all.end(),
                                      [](const Tensor& tensor) { return tensor.scalar_type() == at::kDouble; });
  const auto device = gradients.all.empty() ? c10::Device(at::kCPU) : gradients.all[0].device();
  const Tensor norm = at::full({}, total, at::TensorOptions().dtype(any_double ? at::kDouble : at::kFloat));
  const Tensor coefficient = at::clamp_max(at::div(at::full({}, max_norm, norm.options()), norm.add(1e-6)), 1.0);
  // A NaN norm makes every gradient NaN, as in PyTorch.
  const double scale = coefficient.item<double>();
  if (scale != 1.0) scale_all(gradients.all, scale);
  return norm.to(device);
}

}  // namespace fsdp2
