// labels: ranks
// backends: gloo, shm
// Frozen parameters, outputs and modules that the loss does not use, activations inside containers, and hooks on final
// gradients: each trains like the whole model. Four ranks, so that 2 is a shard size of its own.

#include <fsdp2/detail/trace.h>

#include <algorithm>
#include <map>

#include "fsdp/same_steps.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::fully_shard;
using fsdp2::ReshardAfterForward;
using torch::Tensor;

const ReshardAfterForward kSettings[] = {true, false, 2};
std::string text(const ReshardAfterForward& setting) {
  return std::holds_alternative<int>(*setting) ? "2" : std::get<bool>(*setting) ? "true" : "false";
}

// ----- frozen parameters -------------------------------------------------------------------------------------------

void freeze_weights(const torch::nn::Module& module) {
  for (auto& named : module.named_parameters()) {
    if (named.key().find("weight") != std::string::npos) named.value().set_requires_grad(false);
  }
}
int64_t bytes_of(const torch::nn::Module& module, bool trained_only) {
  int64_t bytes = 0;
  for (const Tensor& param : module.parameters()) {
    if (!trained_only || param.requires_grad()) bytes += param.numel() * 8;
  }
  return bytes;
}

RANKS_TEST(Frozen, BesideTrainedOnesInOneGroupAreNotReduced, 4) {
  for (const ReshardAfterForward& setting : kSettings) {
    for (const bool freeze_after : {false, true}) {
      torch::manual_seed(42);
      auto [reference, model] = make_twins<Tower>(kDim, 3);
      if (!freeze_after) freeze_weights(*model);
      for (Mlp& mlp : model->mlps) fully_shard(mlp, {.reshard_after_forward = setting});
      fully_shard(model, {.reshard_after_forward = setting});
      freeze_weights(*model);
      freeze_weights(*reference);
      const int64_t reduced = bytes_of(*reference, true), gathered = bytes_of(*reference, false);
      std::vector<std::string> order;  // of events in backward
      expect_same_steps(*model, *reference, rank, 3, text(setting), [&](bool sharded, const Tensor& x, int) {
        if (!sharded) return reference(x).sum();
        const Tensor loss = model(x).sum();
        fsdp2::reset_counters();
        order.clear();
        fsdp2::detail::set_trace(
            [&](const char* event, const std::string& module) { order.push_back(std::string(event) + " " + module); });
        return loss;
      });
      fsdp2::detail::set_trace({});
      // Of the last step: one reduction per group, each as soon as its group is through.
      const auto at = [&](const std::string& event) {
        return std::find(order.begin(), order.end(), event) - order.begin();
      };
      for (const char* module : {"", "mlp0", "mlp1", "mlp2"}) {
        EXPECT_EQ(std::count(order.begin(), order.end(), std::string("reduce ") + module), 1) << module;
      }
      EXPECT_LT(at("reduce mlp2"), at("backward mlp0")) << text(setting);
      EXPECT_LT(at("reduce mlp1"), at("reduce mlp0")) << text(setting);
      if (std::holds_alternative<bool>(*setting)) {
        const int64_t again = std::get<bool>(*setting) ? gathered : 0;
        EXPECT_EQ(fsdp2::counters().bytes, reduced + again) << text(setting) << freeze_after;
      }
      EXPECT_EQ(fsdp2::counters().reduce_scatters, 4);
    }
  }
}

/// Linears in a row, every second frozen.
struct RowImpl : torch::nn::Module {
  explicit RowImpl(int count) {
    for (int i = 0; i < count; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), linear(kDim, kDim, true)));
    }
    set_trained(false);
  }
  void set_trained(bool trained) {
    for (size_t i = 0; i < layers.size(); i += 2) {
      for (Tensor& param : layers[i]->parameters()) param.set_requires_grad(trained);
    }
  }
  Tensor forward(Tensor x) {
    for (Linear& layer : layers) x = torch::relu(layer(x));
    return x;
  }
  std::vector<Linear> layers;
};
FSDP2_MODULE(Row);

RANKS_TEST(Frozen, GroupsBetweenTrainedOnesMayBeTrainedLater, 4) {
  for (const ReshardAfterForward& setting : kSettings) {
    for (const bool unfreeze : {false, true}) {
      torch::manual_seed(42);
      auto [reference, model] = make_twins<Row>(6);
      for (Linear& layer : model->layers) fully_shard(layer, {.reshard_after_forward = setting});
      fully_shard(model);
      const std::string where = text(setting) + (unfreeze ? " unfrozen" : "");
      expect_same_steps(*model, *reference, rank, 4, where, [&](bool sharded, const Tensor& x, int step) {
        if (step == 1) {  // a pass without gradients between
          torch::NoGradGuard no_grad;
          EXPECT_FALSE((sharded ? model(x) : reference(x)).requires_grad());
        }
        if (unfreeze && step == 2) (sharded ? model : reference)->set_trained(true);
        fsdp2::reset_counters();
        return (sharded ? model(x) : reference(x)).sum();
      });
      EXPECT_EQ(fsdp2::counters().reduce_scatters, unfreeze ? 6 : 3);  // in the last backward
    }
  }
}

struct RepeatedImpl : torch::nn::Module {
  RepeatedImpl() {
    first = register_module("first", linear(kDim, kDim, true));
    frozen = register_module("frozen", linear(kDim, kDim, true));
    trained = register_module("trained", linear(kDim, kDim, true));
    for (Tensor& param : frozen->parameters()) param.set_requires_grad(false);
  }
  Tensor forward(Tensor x) {
    x = first(x);
    for (int i = 0; i < 3; ++i) {
      x = frozen(torch::relu(trained(x)));
      torch::NoGradGuard no_grad;  // the same layer, with and without gradients
      x += torch::relu(trained(x));
    }
    return x;
  }
  Linear first{nullptr}, frozen{nullptr}, trained{nullptr};
};
FSDP2_MODULE(Repeated);

RANKS_TEST(Frozen, ModulesUsedSeveralTimesWithAndWithoutGradients, 4) {
  for (const ReshardAfterForward& setting : kSettings) {
    torch::manual_seed(42);
    auto [reference, model] = make_twins<Repeated>();
    for (Linear* layer : {&model->first, &model->frozen, &model->trained}) {
      fully_shard(*layer, {.reshard_after_forward = setting});
    }
    fully_shard(model, {.reshard_after_forward = setting});
    expect_same_steps(*model, *reference, rank, 4, text(setting),
                      [&](bool sharded, const Tensor& x, int) { return (sharded ? model(x) : reference(x)).sum(); });
  }
}

RANKS_TEST(Frozen, TensorsOfAnyDtypeTravelBesideTrainedOnes, 2) {
  struct QuantizedImpl : torch::nn::Module {
    QuantizedImpl() {
      coded = register_parameter("coded", torch::randn({6, 4}).to(torch::kFloat8_e4m3fn), false);
      index = register_parameter("index", torch::arange(5), false);
      mask = register_parameter("mask", torch::tensor({true, false, true}), false);
      weight = register_parameter("weight", torch::randn({6, 4}));
    }
    Tensor forward(const Tensor& x) {
      seen = {coded.to(torch::kFloat), index.clone(), mask.clone()};
      return torch::matmul(x, (weight + coded.to(torch::kFloat)).t());
    }
    Tensor coded, index, mask, weight;
    std::vector<Tensor> seen;
  };
  torch::manual_seed(3);
  auto model = std::make_shared<QuantizedImpl>();
  const Tensor coded = model->coded.to(torch::kFloat), weight = model->weight.detach().clone();
  fully_shard(model);
  const Tensor x = torch::full({1, 4}, rank + 1.0);
  const Tensor out = fsdp2::call(model, x);
  EXPECT_EQ(max_difference(model->seen[0], coded), 0);
  EXPECT_TRUE(model->seen[1].equal(torch::arange(5)));
  EXPECT_TRUE(model->seen[2].equal(torch::tensor({true, false, true})));
  EXPECT_LE(max_difference(out.detach(), torch::matmul(x, (weight + coded).t())), 1e-6);
  out.sum().backward();
  EXPECT_EQ(max_difference(whole(model->weight.grad()), torch::full({6, 4}, 1.5)), 0);
}

// ----- parts that the loss does not use ----------------------------------------------------------------------------

struct DoubleImpl : torch::nn::Module {
  explicit DoubleImpl(bool both) : use_both(both) {
    first = register_module("first", linear(kDim, kDim, true));
    second = register_module("second", linear(kDim, kDim, true));
  }
  std::pair<Tensor, Tensor> forward(const Tensor& x) {
    const Tensor out = torch::relu(first(x));
    return {out, use_both ? torch::relu(second(x)) : out};
  }
  Linear first{nullptr}, second{nullptr};
  bool use_both;
};
FSDP2_MODULE(Double);

RANKS_TEST(Autograd, AnOutputThatTheLossLeavesOut, 4) {
  for (const ReshardAfterForward& setting : kSettings) {
    torch::manual_seed(42);
    auto [reference, model] = make_twins<Double>(true);
    fully_shard(model->first, {.reshard_after_forward = setting});
    fully_shard(model, {.reshard_after_forward = setting});
    expect_same_steps(*model, *reference, rank, 6, text(setting), [&](bool sharded, const Tensor& x, int step) {
      const auto [first, second] = sharded ? model(x) : reference(x);
      return step < 3 ? (first * second).sum() : first.sum();
    });
  }
}

RANKS_TEST(Autograd, AModuleThatForwardLeavesOut, 4) {
  for (const ReshardAfterForward& setting : kSettings) {
    torch::manual_seed(42);
    auto [reference, model] = make_twins<Double>(false);
    fully_shard(model->first, {.reshard_after_forward = setting});
    fully_shard(model->second, {.reshard_after_forward = setting});
    fully_shard(model, {.reshard_after_forward = setting});
    expect_same_steps(*model, *reference, rank, 4, text(setting), [&](bool sharded, const Tensor& x, int) {
      return (sharded ? model(x) : reference(x)).first.sum();
    });
  }
}

// ----- activations inside containers -------------------------------------------------------------------------------

struct Named {
  Tensor x, y;
};
FSDP2_FIELDS(Named, x, y);

Tensor& held(std::vector<Tensor>& value) { return value[0]; }
Tensor& held(std::tuple<Tensor, int>& value) { return std::get<0>(value); }
Tensor& held(std::map<std::string, Tensor>& value) { return value["x"]; }
Tensor& held(std::array<Tensor, 2>& value) { return value[1]; }
Tensor& held(std::optional<Tensor>& value) { return *value; }
Tensor& held(Named& value) { return value.x; }

template <class C>
struct BodyImpl : torch::nn::Module {
  BodyImpl() {
    first = register_module("first", torch::nn::Linear(kDim, kDim));
    second = register_module("second", torch::nn::Linear(kDim, kDim));
  }
  C forward(C value) {
    held(value) = torch::relu(second(torch::relu(first(held(value)))));
    return value;
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

template <class C>
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(C empty_value) : empty(std::move(empty_value)) {
    for (int i = 0; i < 3; ++i) {
      bodies.push_back(register_module("body" + std::to_string(i), std::make_shared<BodyImpl<C>>()));
    }
  }
  Tensor forward(const Tensor& x) {
    C value = empty;
    held(value) = x;
    for (auto& body : bodies) value = fsdp2::call(body, value);
    return held(value);
  }
  std::vector<std::shared_ptr<BodyImpl<C>>> bodies;
  C empty;
};

template <class C>
void expect_chain_trains(const C& empty, int rank, const char* name) {
  torch::manual_seed(42);
  auto reference = std::make_shared<ChainImpl<C>>(empty), model = std::make_shared<ChainImpl<C>>(empty);
  copy_state(*model, *reference);
  reference->to(torch::kDouble);
  model->to(torch::kDouble);
  for (auto& body : model->bodies) fully_shard(body);
  fully_shard(model);
  expect_same_steps(*model, *reference, rank, 3, name, [&](bool sharded, const Tensor& x, int) {
    return fsdp2::call(sharded ? model : reference, x).sum();
  });
}

RANKS_TEST(Autograd, ActivationsInsideContainers, 2) {
  expect_chain_trains(std::vector<Tensor>(1), rank, "vector");
  expect_chain_trains(std::tuple<Tensor, int>(), rank, "tuple");
  expect_chain_trains(std::map<std::string, Tensor>(), rank, "map");
  expect_chain_trains(std::array<Tensor, 2>(), rank, "array");
  expect_chain_trains(std::optional<Tensor>(Tensor()), rank, "optional");
  expect_chain_trains(Named{{}, torch::ones({1}, torch::kDouble)}, rank, "struct");
}

// ----- hooks on final gradients ------------------------------------------------------------------------------------

RANKS_TEST(Autograd, HooksOnFinalGradientsRunOncePerBackward, 2) {
  for (const bool offload : {false, true}) {
    torch::manual_seed(42);
    auto [reference, model] = make_twins<Tower>(kDim, 2);
    fsdp2::FullyShardOptions options;
    if (offload) options.offload_policy = fsdp2::CPUOffloadPolicy{.pin_memory = false};
    std::map<std::string, int> calls;
    std::map<std::string, Tensor> seen;
    const auto watch = [&](const std::string& name, const Tensor& each) {
      const void* impl = each.unsafeGetTensorImpl();
      fsdp2::register_post_accumulate_grad_hook(each, [&calls, &seen, name, impl](Tensor& param) {
        ++calls[name];
        EXPECT_EQ(param.unsafeGetTensorImpl(), impl) << name;
        ASSERT_TRUE(fsdp2::is_dtensor(param.grad())) << name;
        seen[name] = fsdp2::DTensor(param.grad()).to_local().clone();
      });
    };
    const auto named_params = model->named_parameters();
    for (size_t i = 0; i < named_params.size(); i += 2) watch(named_params[i].key(), named_params[i].value());
    for (Mlp& mlp : model->mlps) fully_shard(mlp, options);
    auto root = fully_shard(model, options);
    for (size_t i = 1; i < named_params.size(); i += 2) watch(named_params[i].key(), named_params[i].value());
    const auto backward = [&] {
      const Tensor all = torch::randn({4, kDim}, torch::kDouble);
      model(rows_of(all, rank)).sum().backward();
      (reference(all).sum() / 2).backward();
    };
    const auto expect_calls = [&](int count) {
      for (const auto& named : model->named_parameters()) {
        const std::string& name = named.key();
        EXPECT_EQ(calls[name], name == "first.bias" ? 0 : count) << name;
        if (name == "first.bias" || count == 0) continue;
        EXPECT_TRUE(seen[name].equal(fsdp2::DTensor(named.value().grad()).to_local())) << name;
        EXPECT_LE(max_difference(whole(named.value().grad()), reference->named_parameters()[name].grad()), 1e-9)
            << name;
      }
    };
    for (auto* each : {&model, &reference}) (*each)->first->bias.set_requires_grad(false);
    root.set_requires_gradient_sync(false);
    backward();
    expect_calls(0);  // nothing is final yet
    root.set_requires_gradient_sync(true);
    backward();
    expect_calls(1);
    backward();  // accumulates
    expect_calls(2);
  }
}

RANKS_TEST(Autograd, AnOptimizerInTheHookEqualsOneAfterBackward, 2) {
  for (const bool offload : {false, true}) {
    torch::manual_seed(42);
    auto [after, inside] = make_twins<Tower>(kDim, 2);
    fsdp2::FullyShardOptions options;
    if (offload) options.offload_policy = fsdp2::CPUOffloadPolicy{.pin_memory = false};
    for (auto* model : {&after, &inside}) {
      for (Mlp& mlp : (*model)->mlps) fully_shard(mlp, options);
      fully_shard(*model, options);
    }
    torch::optim::AdamW optimizer(after->parameters(), torch::optim::AdamWOptions(1e-2));
    std::map<const void*, std::unique_ptr<torch::optim::AdamW>> optimizers;
    for (const Tensor& param : inside->parameters()) {
      optimizers[param.unsafeGetTensorImpl()] =
          std::make_unique<torch::optim::AdamW>(std::vector<Tensor>{param}, torch::optim::AdamWOptions(1e-2));
      fsdp2::register_post_accumulate_grad_hook(param, [&optimizers](Tensor& each) {
        optimizers.at(each.unsafeGetTensorImpl())->step();
        each.mutable_grad() = Tensor();
      });
    }
    for (int step = 0; step < 4; ++step) {
      torch::manual_seed(70 + 2 * step + rank);
      const Tensor x = torch::randn({2, kDim}, torch::kDouble);
      after(x).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
      inside(x).sum().backward();
      for (const auto& named : after->named_parameters()) {
        const Tensor other = inside->named_parameters()[named.key()];
        EXPECT_FALSE(other.grad().defined()) << named.key();
        EXPECT_EQ(max_difference(whole(other), whole(named.value())), 0) << named.key() << " step " << step;
      }
    }
  }
}

}  // namespace
