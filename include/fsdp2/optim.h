#pragma once

// Optimizers that update all parameters of one dtype and device in one fused call. Python twins: torch.optim.AdamW,
// Adam and SGD with fused=True, whose results they give to the last bit, except for SGD with momentum in bfloat16 and
// float16 on the CPU, which goes round a fault of libtorch's operator.

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <fsdp2/export.h>

namespace fsdp2::optim {

// What holds for all three.
//
// They are made from parameters or parameter groups and libtorch's options, whose defaults are theirs, and keep
// libtorch's state: state dicts, checkpoints, torch::save, schedulers and GradScaler take either, and a checkpoint of
// one loads into the other. State of a sharded parameter is a DTensor of the parameter's layout.
//
// Parameters are plain tensors or DTensors in float32, float64, bfloat16 or float16, of any strides and with empty
// parts; those without a gradient are left alone. step() is local: nothing is sent. It looks at every parameter of
// every group before it writes the first one.
//
// Errors of step(). kUsage: a gradient that waits for its reduction (synchronize_gradients() first); a parameter that
// is whole at the moment beside a sharded gradient or state (reshard() its module first); state from before sharding;
// a gradient or state of another layout. kInvalidArgument: a gradient or state of another dtype, device or shape.
// kUnsupported: sparse gradients; complex and integer parameters.

/// Adam with decoupled weight decay. amsgrad is offered.
class FSDP2_API AdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  /// `closure`, if any, is run first, with gradients on; its result is returned.
  torch::Tensor step(LossClosure closure = nullptr) override;
};

/// Adam; weight decay is added to the gradient. amsgrad is offered.
class FSDP2_API Adam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  torch::Tensor step(LossClosure closure = nullptr) override;  ///< as AdamW's
};

/// Gradient descent with momentum, dampening, Nesterov's form and weight decay. State exists only with momentum.
class FSDP2_API SGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override;  ///< as AdamW's
};

}  // namespace fsdp2::optim
