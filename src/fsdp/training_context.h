#pragma once

// What the module states of one tree share while it trains.

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp2::detail {

class GradientReduction;
class ModuleState;
class ParamGroup;

class TrainingContext : public std::enable_shared_from_this<TrainingContext> {
 public:
  explicit TrainingContext(std::string label);
  ~TrainingContext();

  std::vector<std::weak_ptr<ModuleState>> states;  // module order, the root first
  ModuleState* iteration_root = nullptr;           // outermost module in forward
  bool is_last_backward = true;

  const std::string& label() const { return label_; }

  /// Called by every hook in backward; the first one of a backward queues finish_backward for its end.
  void enter_backward();
  /// Frees what was gathered ahead and not used after all: an optimizer step would leave it with old values.
  void drop_pending_gathers();
  /// Outside backward, clears what a backward that threw left behind.
  void recover_if_interrupted();

  void record_forward(const std::shared_ptr<ParamGroup>& group);
  /// The group whose forward came just before `position`, where it may be gathered ahead; else null.
  std::shared_ptr<ParamGroup> forward_before(size_t position) const;
  void clear_forward_order();

  /// Of these parameters (indices in the group), before their reduction starts.
  void note_reduction(const std::shared_ptr<ParamGroup>& group, std::vector<size_t> params);
  /// At most one reduction is in flight: finish the older one before starting the next.
  void set_reduction(std::unique_ptr<GradientReduction> reduction);
  void finish_reduction();
  void reset();

 private:
  void finish_backward();
  void check_reductions_agree();
  void warn_of_second_root(int graph_task) const;

  std::string label_;
  int graph_task_ = -1;  // autograd's number of the backward under way
  std::vector<std::weak_ptr<ParamGroup>> forward_order_;
  std::unique_ptr<GradientReduction> reduction_;
  std::vector<std::pair<std::shared_ptr<ParamGroup>, std::vector<size_t>>> reduced_;  // in this backward
};

}  // namespace fsdp2::detail
