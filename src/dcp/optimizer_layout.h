#pragma once

// What the optimizers of libtorch keep, in the words of Python's optimizers.

#include <fsdp2/dcp/value.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp2::dcp::detail {

class OptimizerLayout {
 public:
  virtual ~OptimizerLayout() = default;
  /// Hyper-parameters of a group with all of Python's keys but "params"; its defaults where
  /// libtorch has none.
  virtual StateDict hyper_parameters(const torch::optim::OptimizerOptions& options) const = 0;
  /// Takes one hyper-parameter over. False where libtorch has none of that name.
  virtual bool set_hyper_parameter(torch::optim::OptimizerOptions& options, const std::string& key,
                                   const Value& value) const = 0;
  /// Names of the tensors that a parameter of this group has, "step" not among them.
  virtual std::vector<std::string> fields(const torch::optim::OptimizerOptions& options) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state() const = 0;
  virtual at::Tensor& field(torch::optim::OptimizerParamState& state, const std::string& name) const = 0;
  /// Null where the optimizer does not count.
  virtual int64_t* step(torch::optim::OptimizerParamState& state) const = 0;
  /// What a fresh tensor of state is filled with.
  virtual double initial_value(const torch::optim::OptimizerOptions&) const { return 0; }
  /// The optimizer expects state from its constructor on and makes none later.
  virtual bool needs_state() const { return false; }
};

/// kUnsupported for an optimizer that is not one of SGD, Adam, AdamW, Adagrad and RMSprop, or
/// derived from one.
const OptimizerLayout& layout_of(const torch::optim::OptimizerOptions& options);

}  // namespace fsdp2::dcp::detail
