#pragma once

// Does the sharded program compute what the plain one does? Runs both side by side and names the first difference.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <fsdp2/export.h>
#include <fsdp2/module_ref.h>

namespace fsdp2 {

/// The tensors of one step, e.g. {inputs, targets}; dim 0 of each counts the samples of all ranks together.
using ParityBatch = std::vector<at::Tensor>;

/// A model with its optimizer and its loss. Made by parity_side().
struct ParitySide {
  std::shared_ptr<torch::nn::Module> module;
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  std::function<at::Tensor(const ParityBatch&)> loss;  ///< runs forward; a scalar
};

/// `model`: a holder (TORCH_MODULE's or FSDP2_MODULE's). `optimizer`: one over model->parameters(). `loss`: called as
/// loss(model, batch), runs the model and returns the mean over the samples as a scalar.
template <class Holder, class Optimizer, class Loss>
ParitySide parity_side(Holder model, Optimizer optimizer, Loss loss) {
  return {model.ptr(), std::make_shared<Optimizer>(std::move(optimizer)),
          [model, loss](const ParityBatch& batch) mutable -> at::Tensor { return loss(model, batch); }};
}

/// What to train on: a list of batches, used in turn, or a function of the step. Equal on all ranks.
class ParityInputs {
 public:
  ParityInputs(std::vector<ParityBatch> batches)
      : batch_([batches = std::move(batches)](int64_t step) -> ParityBatch {
          return batches.empty() ? ParityBatch{} : batches[static_cast<size_t>(step) % batches.size()];
        }) {}
  template <class F>
  requires std::is_invocable_r_v<ParityBatch, F&, int64_t> ParityInputs(F function) : batch_(std::move(function)) {}

  ParityBatch at(int64_t step) const { return batch_(step); }

 private:
  std::function<ParityBatch(int64_t step)> batch_;
};

struct ParityOptions {
  /// Give the sharded model the plain one's initial parameters and buffers (those of rank 0). false: both are taken as
  /// they were made, which needs equal seeds.
  bool copy_weights = true;
  /// Each rank's sharded model gets its part of the rows of every batch. false: the whole batch on every rank.
  bool split_batch = true;
};

struct ParityDifference {
  std::string kind;  ///< "parameter names", "shape", "buffer names", "loss", "gradient" or "weight"
  std::string fqn;   ///< "" for a loss
  int64_t step = 0;  ///< counted from 0
  /// Largest absolute difference over max(1, largest magnitude of the plain side); infinity for NaN, and for a gradient
  /// that one side lacks.
  double difference = 0;
  std::string text;
};

struct FSDP2_API ParityReport {
  bool ok = false;
  /// Of the first step that differs: the loss, then gradients, then weights, each in the model's order. The first
  /// entry is where to look.
  std::vector<ParityDifference> differences;
  std::vector<double> plain_losses, sharded_losses;  ///< of each step that ran; the sharded ones averaged over ranks
  double largest_difference = 0;                     ///< of all that was compared
  std::vector<std::string> notes;                    ///< what makes the two differ by design: dropout, batch norm

  std::string to_string() const;
};

/// Trains a plain model, which sees the whole batch on every rank, and a sharded one, of which every rank sees its
/// rows, and compares after each step the losses, the gradients before optimizer.step() and the weights after it, in
/// double precision. Stops after the first step that differs. All ranks call it after init_process_group, with
/// equal arguments, and get the same report. The plain model is as large as it is on every rank.
///
/// Best with models in float64, where rounding does not hide or feign a difference (`net->to(torch::kDouble)` in both
/// factories); Adam turns the rounding of a gradient that is nearly zero into a step of full size, so use SGD for
/// float32. With a mixed precision policy, `tolerance` is about 0.02.
/// Errors: kInvalidArgument (rows that the ranks do not divide, a loss that is no scalar, no module or optimizer,
/// steps < 1); what the two sides throw.
///
///     auto loss = [](auto& net, const fsdp2::ParityBatch& batch) { return torch::mse_loss(net(batch[0]), batch[1]); };
///     auto make_plain = [&] {
///       Net net(32);
///       return fsdp2::parity_side(net, torch::optim::SGD(net->parameters(), 0.1), loss);
///     };
///     auto make_sharded = [&] {
///       Net net(32);
///       for (auto& block : net->blocks) fsdp2::fully_shard(block);
///       fsdp2::fully_shard(net);
///       return fsdp2::parity_side(net, torch::optim::SGD(net->parameters(), 0.1), loss);
///     };
///     const auto report = fsdp2::check_parity(make_plain, make_sharded, batches, /*steps=*/3);
///     if (!report.ok) std::cerr << report.to_string();
FSDP2_API ParityReport check_parity(const std::function<ParitySide()>& make_plain,
                                    const std::function<ParitySide()>& make_sharded, const ParityInputs& inputs,
                                    int64_t steps = 3, double tolerance = 1e-4, const ParityOptions& options = {});

}  // namespace fsdp2
