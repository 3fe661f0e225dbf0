#pragma once

// What the module states of one tree share while it trains.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Event.h>

#include <fsdp2/process_group.h>

#include "fsdp/reduction_queue.h"

namespace fsdp2::detail {

class ModuleState;
class ParamGroup;

class TrainingContext : public std::enable_shared_from_this<TrainingContext> {
 public:
  explicit TrainingContext(std::string label);
  ~TrainingContext();

  std::vector<std::weak_ptr<ModuleState>> states;  // module order, the root first
  ModuleState* iteration_root = nullptr;           // outermost module in forward
  bool is_last_backward = true;
  uint64_t forwards = 0;                         // of modules, that began so far
  size_t max_input_buffers = 1;                  // the largest that a group of the tree asks for
  std::shared_ptr<c10::Event> post_optim_event;  // for the next forward of the root
  std::shared_ptr<ReductionQueue> reductions;
  bool diagnose_due = false;  // FSDP2_DIAGNOSE=1: at the next forward of the root

  /// Called by every hook in backward; the first one of a backward queues finish_backward for its end. One that a node
  /// of another runs ends with that: until then its gradients may wait for their reduction.
  void enter_backward();
  bool in_backward() const { return graph_task_ != -1; }
  // Note [Parameters in shared memory]
  /// From here to end_in_place() groups in shared memory are shown in place. Collective over their ranks.
  void begin_in_place(bool only_changed);
  /// Waits until nobody reads any more. Collective.
  void end_in_place(bool backward_follows);
  /// Without the others, after an exception.
  void abandon_in_place() noexcept;
  /// Frees what was gathered ahead and not used after all: an optimizer step would leave it with old values.
  void drop_pending_gathers();
  /// Outside backward, clears what a backward that threw left behind.
  void recover_if_interrupted();

  void record_forward(const std::shared_ptr<ModuleState>& state);
  /// The module whose forward came just before `position`, where it may be gathered ahead; else null.
  std::shared_ptr<ModuleState> forward_before(size_t position) const;
  void clear_forward_order();

  /// Starts a reduction of (index of parameter, whole gradient) of the group.
  void reduce(const std::shared_ptr<ParamGroup>& group, std::vector<std::pair<size_t, at::Tensor>> gradients,
              bool all_reduce);
  /// Waits for all reductions; ranks compare what they reduced. At the end of backward, or of a reduction outside it.
  void finish_reductions();
  /// After a group's setting changed.
  void update_max_input_buffers();
  void reset();

  /// `param`'s gradient came without a reduction; its hooks run at the end of backward.
  void note_hooks(const std::shared_ptr<ParamGroup>& group, size_t param);

 private:
  class BackwardEnd;
  void finish_backward();
  void interrupt_backward() noexcept;
  void check_reductions_agree();
  template <class F>
  void for_groups(F&& use) const;
  void warn_of_second_root(int graph_task) const;

  std::string label_;
  int graph_task_ = -1;                      // autograd's number of the backward under way, the outermost
  std::weak_ptr<BackwardEnd> backward_end_;  // of that; gone once it ended, by an exception too
  bool reduced_any_ = false;                 // in this backward
  bool first_step_over_ = false;
  std::vector<std::weak_ptr<ModuleState>> forward_order_;
  // Of this backward. Weak: groups hold this object.
  std::vector<std::pair<std::weak_ptr<ParamGroup>, std::vector<size_t>>> reduced_;
  std::vector<std::pair<std::weak_ptr<ParamGroup>, size_t>> hooks_at_end_;
};

/// kUsage, on all ranks of `over`, each of which says what it reduced.
[[noreturn]] void throw_different_reductions(const std::string& names, const ProcessGroup& over);

}  // namespace fsdp2::detail
