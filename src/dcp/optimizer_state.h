#pragma once

// What get_ and set_optimizer_state_dict do.

#include <torch/optim/optimizer.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "dcp/model_view.h"
#include "dcp/optimizer_layout.h"
#include "dcp/value_source.h"

namespace fsdp2::dcp::detail {

/// The nested form, sharing memory; state that does not exist is zeros. `flat`: the flat one.
StateDict collect_optimizers(const ModelView& view, const std::vector<torch::optim::Optimizer*>& optimizers, bool flat);

/// State of one parameter in Python's words; null `state` = what a fresh one would be.
StateDict read_state(const OptimizerLayout& layout, const torch::optim::OptimizerOptions& options,
                     torch::optim::OptimizerParamState* state, const at::Tensor& param, const std::string& fqn);

/// `value`, state of `param`, as the optimizer would hold it: of the parameter's layout and on its device; this rank's
/// part where it is whole. The same memory where it fits and is `own`.
at::Tensor in_layout_of(const at::Tensor& param, const at::Tensor& value, const std::string& fqn, bool own);

/// Looks at everything that can be wrong, then changes everything.
class OptimizerSetter {
 public:
  OptimizerSetter(const ModelView& view, std::vector<torch::optim::Optimizer*> optimizers,
                  const StateDictOptions& options)
      : view_(view), optimizers_(std::move(optimizers)), options_(options) {}

  /// `state` is nested and by name, a dict of `source` and alive until apply().
  void plan(const StateDict& state, ValueSource& source);
  /// Everything but the tensors, which `source` has delivered: fresh state is made like the parameters are now.
  void apply();

 private:
  /// A parameter that gets its state from the dict, or starts afresh (`saved` is null).
  struct Change {
    torch::optim::Optimizer* optimizer;
    const torch::optim::OptimizerParamGroup* group;
    at::Tensor param;
    std::string fqn;
    const StateDict* saved;
    int64_t step = 0;
  };

  void index_groups();
  void plan_group(torch::optim::Optimizer& optimizer, size_t index, ValueSource& source);
  const StateDict* saved_group(const torch::optim::OptimizerParamGroup& group, size_t index);
  void plan_param(torch::optim::Optimizer& optimizer, const torch::optim::OptimizerParamGroup& group,
                  const torch::optim::OptimizerOptions& options, const at::Tensor& param,
                  const std::vector<std::string>& names, ValueSource& source);
  bool is_complete(const StateDict& saved, const OptimizerLayout& layout, const std::vector<std::string>& fields,
                   const std::string& fqn) const;

  const ModelView& view_;
  std::vector<torch::optim::Optimizer*> optimizers_;
  const StateDictOptions& options_;

  const StateDict* state_ = nullptr;
  std::vector<const StateDict*> groups_;
  std::unordered_map<std::string, size_t> group_of_;
  std::vector<size_t> empty_groups_;  // of the dict, where the optimizers have as many
  size_t next_empty_ = 0;

  std::vector<std::pair<torch::optim::OptimizerParamGroup*, const StateDict*>> hyper_parameters_;
  std::vector<Change> changes_;
  size_t found_ = 0, absent_ = 0;
  std::string first_absent_;
};

}  // namespace fsdp2::dcp::detail
