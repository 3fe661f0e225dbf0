#pragma once

// Models and comparisons of tests that run a sharded model beside the whole one. The whole one sees the batch of all
// ranks and divides by their number, so no collective is needed for what is expected.

#include <torch/torch.h>

#include <string>
#include <vector>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace fsdp2::testing {

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int64_t dim, int64_t multiplier = 2) {
    in_proj = register_module("in_proj", linear(dim, multiplier * dim, true));
    out_proj = register_module("out_proj", linear(multiplier * dim, dim, true));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::relu(out_proj(torch::relu(in_proj(x)))); }
  Linear in_proj{nullptr}, out_proj{nullptr};
};
FSDP2_MODULE(Mlp);

/// A layer of its own, then MLPs.
struct TowerImpl : torch::nn::Module {
  TowerImpl(int64_t dim, int64_t count) {
    first = register_module("first", torch::nn::Linear(dim, dim));
    for (int64_t i = 0; i < count; ++i) mlps.push_back(register_module("mlp" + std::to_string(i), Mlp(dim)));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = first(x);
    for (Mlp& mlp : mlps) x = mlp(x);
    return x;
  }
  torch::nn::Linear first{nullptr};
  std::vector<Mlp> mlps;
};
FSDP2_MODULE(Tower);

/// The rows of this rank in the batch of all ranks.
inline torch::Tensor rows_of(const torch::Tensor& all, int rank) {
  const int64_t rows = all.size(0) / get_world_size();
  return all.narrow(0, rank * rows, rows);
}

/// Parameters of `model`, which may be sharded, equal those of `reference`, which is whole.
inline void expect_same_values(const torch::nn::Module& model, const torch::nn::Module& reference,
                               const std::string& where, double tolerance = 1e-9) {
  const auto expected = reference.named_parameters();
  for (const auto& named : model.named_parameters()) {
    EXPECT_LE(max_difference(whole(named.value()), expected[named.key()].detach()), tolerance)
        << named.key() << " " << where;
  }
}

inline void expect_same_gradients(const torch::nn::Module& model, const torch::nn::Module& reference,
                                  const std::string& where, double tolerance = 1e-9) {
  const auto expected = reference.named_parameters();
  for (const auto& named : model.named_parameters()) {
    const torch::Tensor &grad = named.value().grad(), &whole_grad = expected[named.key()].grad();
    ASSERT_EQ(grad.defined(), whole_grad.defined()) << named.key() << " " << where;
    if (grad.defined()) {
      EXPECT_LE(max_difference(whole(grad), whole_grad), tolerance) << named.key() << " " << where;
    }
  }
}

/// Adam steps of both; `next()` is the batch of all ranks. In float64, where a wrong value is told from rounding.
template <class Holder, class Next>
void expect_trains_like(Holder& model, Holder& reference, int rank, int steps, Next&& next, const std::string& where,
                        double tolerance = 1e-9) {
  torch::optim::Adam optimizer(model->parameters(), 1e-2), expected_optimizer(reference->parameters(), 1e-2);
  for (int step = 0; step < steps; ++step) {
    const std::string at = where + " step " + std::to_string(step);
    const torch::Tensor all = next();
    const torch::Tensor out = model(rows_of(all, rank)), expected = reference(all);
    EXPECT_LE(max_difference(out.detach(), rows_of(expected.detach(), rank)), tolerance) << at;
    out.sum().backward();
    (expected.sum() / get_world_size()).backward();
    expect_same_gradients(*model, *reference, at, tolerance);
    optimizer.step();
    expected_optimizer.step();
    expect_same_values(*model, *reference, at, tolerance);
    optimizer.zero_grad(step % 2 == 0);
    expected_optimizer.zero_grad(step % 2 == 0);
  }
}

/// An unsharded module and a copy of it, in float64.
template <class Holder, class... Args>
std::pair<Holder, Holder> make_twins(Args&&... args) {
  Holder reference(args...), model(args...);
  copy_state(*model, *reference);
  reference->to(torch::kDouble);
  model->to(torch::kDouble);
  return {reference, model};
}

/// Every group below the module frees its whole parameters.
inline void reshard_all(const torch::nn::Module& module) {
  for (const auto& each : module.modules()) {
    if (is_fsdp_module(*each)) fsdp_module(*each).reshard();
  }
}

}  // namespace fsdp2::testing
