#pragma once

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace fsdp2::detail {

class GradientReduction;
class ParamGroup;
class TrainingContext;

/// Reductions in flight, oldest first. Trees that share_comm_ctx() joined have one together.
class ReductionQueue {
 public:
  ReductionQueue();
  ~ReductionQueue();
  /// Starts one after finishing as many older ones as it takes for at most `max_inputs` to hold their input. Returns
  /// whether its end will tell ranks that reduce different things.
  bool start(std::shared_ptr<ParamGroup> group, std::vector<std::pair<size_t, at::Tensor>> gradients, bool all_reduce,
             size_t max_inputs);
  void finish_all();
  /// Drops what is in flight for this tree, after an exception.
  void abandon(const TrainingContext& context) noexcept;

 private:
  void finish_oldest();

  std::deque<std::unique_ptr<GradientReduction>> running_;
};

}  // namespace fsdp2::detail
