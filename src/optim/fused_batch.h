#pragma once

// What the fused optimizers share: parameters, gradients and state as lists of plain tensors, checked.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <torch/optim/optimizer.h>

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tensor/dtensor_spec.h"

namespace fsdp2::detail {

/// A parameter that has a gradient. Where it stands is for messages.
struct ParamUpdate {
  const char* optimizer;
  size_t group, position;
  const Tensor& param;
  const DTensorSpec* spec;  // null where the parameter is plain
  const Tensor& local;      // plain
  const Tensor& grad;       // plain, of the shape, dtype and device of `local`
};

/// Throws unless the gradient of `param`, which is defined, fits it.
ParamUpdate read_update(const char* optimizer, size_t group, size_t position, const Tensor& param);

/// The operands of one call of a fused operator: plain, not empty, contiguous.
struct FusedBatch {
  size_t group;
  at::ScalarType dtype;
  c10::Device device;
  int64_t step;  // that its parameters take now, from 1

  std::vector<Tensor> params, grads;
  std::array<std::vector<Tensor>, 3> states;      // in the optimizer's order
  std::vector<Tensor> behind;                     // what flat views in the lists show
  std::vector<std::pair<Tensor, Tensor>> copies;  // what is written, and the copy that stands in for it in the lists

  /// `state`: plain parts of the parameter's shape.
  void add(const ParamUpdate& update, c10::ArrayRef<const Tensor*> state);
  /// Version counters tell others, such as a gather under way, of writes below autograd.
  void count_writes();
  void copy_back();
};

/// The batches of one step(). Unless they are run, the optimizer's state is as it was.
class FusedBatches {
 public:
  using States = std::decay_t<decltype(std::declval<torch::optim::Optimizer&>().state())>;

  explicit FusedBatches(States& states) : states_(states) {}
  FusedBatches(const FusedBatches&) = delete;
  ~FusedBatches();

  /// The parameter's state, made where there is none.
  template <class State>
  State& state_of(const ParamUpdate& update) {
    void* const key = update.param.unsafeGetTensorImpl();
    auto& slot = states_[key];
    if (slot == nullptr) {
      keys_made_.push_back(key);
      slot = std::make_unique<State>();
    }
    return static_cast<State&>(*slot);
  }
  /// The plain part of state called `name`; made with zeros where there is none. Throws unless it fits the parameter.
  const Tensor& state_part(const ParamUpdate& update, Tensor& state, const char* name);
  /// `step` with this one counted.
  int64_t count(int64_t& step);
  void add(const ParamUpdate& update, int64_t step, c10::ArrayRef<const Tensor*> state);

  /// Calls `run_batch(batch)` one after the other, below autograd and the dispatch of DTensors.
  template <class RunBatch>
  void run(RunBatch&& run_batch) {
    taken_ = true;
    const BelowDTensor below;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (FusedBatch& batch : batches_) {
      batch.count_writes();
      run_batch(batch);
      batch.copy_back();
    }
  }

 private:
  FusedBatch& batch_of(const ParamUpdate& update, int64_t step);

  std::vector<FusedBatch> batches_;
  std::vector<int64_t*> counted_;
  std::vector<Tensor*> made_;
  States& states_;
  std::vector<void*> keys_made_;
  bool taken_ = false;
};

}  // namespace fsdp2::detail
