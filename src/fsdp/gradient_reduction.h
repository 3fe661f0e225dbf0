#pragma once

// Note [Reduction is one pipeline]
// cast and copy in -> scale -> reduce-scatter -> (partial sum, all-reduce over replicas) -> scale -> cast -> add to
// the sharded gradients. Scaling is done here, never by the backend (Gloo and NCCL disagree on AVG), and once.

#include <memory>
#include <utility>
#include <vector>

#include "fsdp/param_group.h"

namespace fsdp2::detail {

/// The gradients of one backward of one group on their way to the shards.
class GradientReduction {
 public:
  /// Starts it; `gradients` are (index of parameter, whole gradient) and are freed as they are copied.
  GradientReduction(std::shared_ptr<ParamGroup> group, std::vector<std::pair<size_t, Tensor>> gradients);
  /// Waits and adds the result to the parameters' gradients.
  void finish();

 private:
  struct Bucket {
    at::ScalarType dtype{};
    std::vector<std::pair<size_t, int64_t>> members;  // parameter and its offset in one rank's part
    int64_t numel = 0;                                // of one rank
    Tensor in, out;
    PendingCollective work;
    double divide_after = 1;
  };
  void copy_in(Bucket& bucket, std::vector<std::pair<size_t, Tensor>>& gradients);
  void start(Bucket& bucket);
  void add_to_gradients(Bucket& bucket);
  void reduce_alone(std::vector<std::pair<size_t, Tensor>>& gradients);

  std::shared_ptr<ParamGroup> group_;
  std::vector<Bucket> buckets_;
};

}  // namespace fsdp2::detail
