#pragma once

// Trains the Llama of examples/llama in one of the modes that bench_train compares.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model.h"

namespace bench {

struct TrainOptions {
  llama::Config model{.dim = 256, .layers = 4, .heads = 8, .kv_heads = 4, .ffn = 704, .vocab = 4096};
  int64_t seq = 128, batch = 2, grad_accum = 1;
  std::string dtype = "fp32", reshard_after_forward = "default", opt_impl = "default";
  bool mp = false;  // bf16 parameters, fp32 reduction
  double clip = 0, lr = 1e-3;
};

/// The whole model with the weights of the hash rule, in options.dtype.
llama::Llama build_model(const TrainOptions& options);

/// Wall time of one step and of its parts, in seconds, on this rank.
struct StepTimes {
  double step = 0, forward = 0, backward = 0, clip = 0, optim = 0;
};

class Trainer {
 public:
  /// `mode`: fsdp2, nocomm, stub or local, as bench_train.cpp describes them. Collective.
  Trainer(std::string mode, const TrainOptions& options);

  /// One step on the tokens of step `index`, after a barrier that is not timed. `at_peak`, where given, is called
  /// after each forward, each backward and the optimizer.
  void step(int64_t index, const std::function<void()>& at_peak = {});

  const std::string& mode() const { return mode_; }
  int64_t num_parameters() const { return num_parameters_; }
  /// Of all steps so far, in order.
  const std::vector<StepTimes>& times() const { return times_; }
  const std::vector<double>& losses() const { return losses_; }  // mean over this rank's micro-batches

 private:
  void shard();
  void take_own_shards();
  void gradients_to_shards();
  void shards_to_weights();

  std::string mode_;
  TrainOptions options_;
  int rank_, world_;
  llama::Llama model_;
  std::optional<fsdp2::FSDPModule> sharded_;
  std::vector<torch::Tensor> parameters_;                            // what the optimizer steps
  std::vector<std::pair<torch::Tensor, torch::Tensor>> own_shards_;  // nocomm: whole parameter, its trained part
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  int64_t num_parameters_ = 0;
  std::vector<StepTimes> times_;
  std::vector<double> losses_;
};

}  // namespace bench
