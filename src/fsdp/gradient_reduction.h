#pragma once

// Note [Reduction is one pipeline]
// cast and copy in -> scale -> reduce-scatter -> (partial sum, all-reduce over replicas) -> scale -> user's hook ->
// cast -> add to the sharded gradients -> users' hooks on parameters. Scaling is done here, never by the backend (Gloo
// and NCCL disagree on AVG), and the divisor is applied once whatever the sizes of the two axes. On the shm backend
// the steps up to the first scaling are one: Note [Reductions through a ring].

#include <memory>
#include <utility>
#include <vector>

#include "fsdp/param_group.h"
#include "fsdp/staged_reduction.h"

namespace fsdp2::detail {

/// The gradients of one backward of one group on their way to the shards.
class GradientReduction {
 public:
  /// Starts it; `gradients` are (index of parameter, whole gradient, undefined for zeros) and are freed as they are
  /// copied. Without `all_reduce` the sum over the shards is kept for a later one.
  GradientReduction(std::shared_ptr<ParamGroup> group, std::vector<std::pair<size_t, Tensor>> gradients,
                    bool all_reduce);
  /// Waits for the reduce-scatter, frees its input, starts the all-reduce.
  void finish_reduce_scatter();
  bool holds_input() const { return holds_input_; }
  /// Whether it may wait beside others: small, and staged, so that a rank that is late does not hold this one up.
  bool is_light() const { return is_light_; }
  /// Waits for everything and adds the result to the parameters' gradients.
  void finish();
  /// After an exception: waits, drops the result.
  void abandon() noexcept;
  const ParamGroup& group() const { return *group_; }
  /// Whether finish() itself tells ranks that reduce different things.
  bool ranks_compared() const;

 private:
  struct Bucket {
    at::ScalarType dtype{};
    std::vector<std::pair<size_t, int64_t>> members;  // parameter and its offset in one rank's part
    int64_t numel = 0;                                // of one rank
    Tensor in, out;
    PendingCollective work;
    std::unique_ptr<StagedReduction> staged;  // in place of `in` and a collective
    bool divided = false;
  };
  void sort_into_buckets(const std::vector<std::pair<size_t, Tensor>>& gradients);
  void copy_in(Bucket& bucket, std::vector<std::pair<size_t, Tensor>>& gradients);
  void start(Bucket& bucket);
  bool stage(Bucket& bucket, std::vector<std::pair<size_t, Tensor>>& gradients);
  [[noreturn]] void throw_ranks_differ(const Bucket& bucket) const;
  void start_all_reduce(Bucket& bucket);
  void finish_buckets();
  void run_user_hook(Tensor& reduced) const;
  void keep_partial_sums(Bucket& bucket);
  void add_to_gradients(Bucket& bucket);
  void add_alone(std::vector<std::pair<size_t, Tensor>>& gradients);
  void add_to(FSDPParam& param, Tensor local);
  /// What the sum over all ranks is divided by in all.
  double divisor() const;

  std::shared_ptr<ParamGroup> group_;
  std::vector<Bucket> buckets_;
  std::vector<size_t> added_;  // parameters whose gradient is final
  bool all_reduce_;
  bool holds_input_ = true;
  bool is_light_ = false;
  uint64_t times_shown_;  // of the group, when it started
};

}  // namespace fsdp2::detail
