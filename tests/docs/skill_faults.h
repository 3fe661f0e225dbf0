#pragma once

// Programs with one fault each, and what they say: the texts that skills/ lists must be among these. Included where
// the model of the skill, Net, is defined.

#include <sstream>

namespace faults {

struct Fault {
  const char* name;
  std::function<void()> run;
};

inline Net sharded(bool root = true) {
  torch::manual_seed(0);
  Net net(32, 16, 2);
  for (auto& block : net->blocks) fsdp2::fully_shard(block);
  if (root) fsdp2::fully_shard(net);
  return net;
}
inline Net on_meta() {
  Net net = nullptr;
  fsdp2::MetaDeviceGuard meta;
  net = Net(32, 16, 2);
  return net;
}
inline torch::Tensor rows() { return torch::ones({4, 32}); }
inline torch::optim::SGD sgd(Net& net) { return torch::optim::SGD(net->parameters(), 0.1); }

struct ScaleImpl : torch::nn::Module {
  ScaleImpl() { scale = register_parameter("scale", torch::tensor(2.0)); }
  torch::Tensor forward(const torch::Tensor& x) { return x * scale; }
  torch::Tensor scale;
};
struct TableImpl : torch::nn::Module {  // no reset_parameters()
  TableImpl() { table = register_parameter("table", torch::zeros({4, 32})); }
  torch::Tensor forward(const torch::Tensor& x) { return x + table; }
  torch::Tensor table;
};
FSDP2_MODULE(Table);
struct LooksImpl : torch::nn::Module {
  LooksImpl() { TORCH_CHECK(torch::ones({2}).sum().item<float>() == 2); }
};
struct ChoiceImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x, bool first) { return first ? a(x) : b(x); }
  torch::nn::Linear a = register_module("a", torch::nn::Linear(32, 2)),
                    b = register_module("b", torch::nn::Linear(32, 2));
};
FSDP2_MODULE(Choice);

inline std::vector<Fault> all() {
  using namespace fsdp2;
  return {
      {"init twice", [] { init_process_group(); }},
      {"forward past the hooks", [] { sharded()->forward(rows()); }},
      {"block's forward past the hooks",
       [] {
         sharded()->blocks[0]->forward(torch::ones({4, 16}));
       }},
      {"still on meta",
       [] {
         auto net = on_meta();
         fully_shard(net);
         net(rows());
       }},
      {"never written",
       [] {
         auto net = on_meta();
         fully_shard(net);
         to_empty(net, local_device());
         net(rows());
       }},
      {"reset before to_empty",
       [] {
         auto net = on_meta();
         fully_shard(net);
         reset_parameters(net);
       }},
      {"nothing resets it",
       [] {
         Table table = nullptr;
         {
           MetaDeviceGuard meta;
           table = Table();
         }
         fully_shard(table);
         to_empty(table, local_device());
         reset_parameters(table);
       }},
      {"seeds that differ",
       [] {
         auto net = on_meta();
         fully_shard(net);
         to_empty(net, local_device());
         torch::manual_seed(get_rank());
         reset_parameters(net);
       }},
      {"a constructor that reads values",
       [] {
         MetaDeviceGuard meta;
         LooksImpl looks;
       }},
      {"root before its blocks",
       [] {
         Net net(32, 16, 2);
         fully_shard(net);
         fully_shard(net->blocks[0]);
       }},
      {"twice",
       [] {
         auto net = sharded();
         fully_shard(net);
       }},
      {"a block before its root",
       [] {
         auto net = sharded();
         net->blocks[0](torch::ones({4, 16}));
         net(rows());
       }},
      {"the root forgotten, clipping",
       [] {
         auto net = sharded(false);
         net(rows()).sum().backward();
         clip_grad_norm_(net->parameters(), 1.0);
       }},
      {"the root forgotten, saving", [] { get_model_state_dict(sharded(false)); }},
      {"a list of modules", [] { fully_shard(torch::nn::ModuleList(torch::nn::Linear(2, 2))); }},
      {"a parameter without dimensions", [] { fully_shard(std::make_shared<ScaleImpl>()); }},
      {"a mesh without names",
       [] {
         Net net(32, 16, 2);
         fully_shard(net, {.mesh = init_device_mesh(torch::kCPU, {1, 2})});
       }},
      {"a mesh of too many ranks",
       [] {
         init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
       }},
      {"an axis that is not there", [] { init_device_mesh(torch::kCPU, {2}, {"dp"})["tp"]; }},
      {"a reshard number that does not divide",
       [] {
         Net net(32, 16, 2);
         fully_shard(net, {.reshard_after_forward = 3});
       }},
      {"integers as computation dtype",
       [] {
         Net net(32, 16, 2);
         fully_shard(net, {.mp_policy = {.param_dtype = torch::kLong}});
       }},
      {"written while whole",
       [] {
         auto net = sharded();
         auto handle = fsdp_module(net);
         handle.unshard();
         {
           torch::NoGradGuard no_grad;
           net->head->bias.zero_();
         }
         handle.reshard();
       }},
      {"a step after an evaluation",
       [] {
         auto net = sharded();
         auto optimizer = sgd(net);
         net(rows()).sum().backward();
         {
           torch::NoGradGuard no_grad;
           net(rows());
         }
         optimizer.step();
       }},
      {"torch::save",
       [] {
         std::ostringstream out;
         torch::save(sharded(), out);
       }},
      {"a step before the sum",
       [] {
         auto net = sharded();
         auto optimizer = sgd(net);
         fsdp_module(net).set_requires_gradient_sync(false);
         net(rows()).sum().backward();
         optimizer.step();
       }},
      {"clipping before the sum",
       [] {
         auto net = sharded();
         fsdp_module(net).set_requires_gradient_sync(false);
         net(rows()).sum().backward();
         clip_grad_norm_(net->parameters(), 1.0);
       }},
      {"an optimizer of another model",
       [] {
         auto net = sharded();
         Net other(32, 16, 2);
         auto optimizer = sgd(other);
         get_optimizer_state_dict(net, optimizer);
       }},
      {"a plain value copied in",
       [] {
         auto net = sharded();
         torch::NoGradGuard no_grad;
         net->head->weight.copy_(torch::ones({1, 16}));
       }},
      {"a penalty beside the loss",
       [] {
         auto net = sharded();
         (net(rows()).sum() + fsdp2::DTensor(net->head->weight).full_tensor().pow(2).sum()).backward();
       }},
      {"a penalty on a shard", [] { sharded()->head->weight.pow(2).sum(); }},
      {"a plain tensor as data",
       [] {
         auto net = sharded();
         net->head->weight.set_data(torch::ones({1, 16}));
         net(rows());
       }},
      {"a parameter that came late",
       [] {
         auto net = sharded();
         net->register_parameter("late", torch::ones({2}));
         net(rows());
       }},
      {"two tensors over one memory",
       [] {
         Choice model;
         model->b->weight.set_data(model->a->weight.data());
         fully_shard(model);
       }},
      {"ranks that build different models",
       [] {
         Net net(32, get_rank() == 0 ? 16 : 24, 2);
         fully_shard(net);
         net(rows());
       }},
      {"ranks that use different parameters",
       [] {
         Choice model;
         fully_shard(model);
         model(rows(), get_rank() == 0).sum().backward();
       }},
      {"no checkpoint",
       [] {
         dcp::StateDict state{{"model", get_model_state_dict(sharded())}};
         dcp::load(state, "nowhere");
       }},
      {"a checkpoint that is there",
       [] {
         dcp::StateDict state{{"step", 1}};
         dcp::save(state, "there");
         dcp::save(state, "there");
       }},
      {"a key that the checkpoint lacks",
       [] {
         dcp::StateDict state{{"step", 1}};
         dcp::save(state, "few");
         state["model"] = get_model_state_dict(sharded());
         dcp::load(state, "few");
       }},
      {"another size",
       [] {
         Net small(32, 16, 2), large(32, 24, 2);
         fully_shard(small);
         fully_shard(large);
         dcp::StateDict state{{"model", get_model_state_dict(small)}}, other{{"model", get_model_state_dict(large)}};
         dcp::save(state, "sizes");
         dcp::load(other, "sizes");
       }},
      {"another dtype",
       [] {
         dcp::StateDict state{{"w", torch::ones({2})}}, other{{"w", torch::ones({2}, torch::kBFloat16)}};
         dcp::save(state, "dtypes");
         dcp::load(other, "dtypes");
       }},
      {"a value that differs",
       [] {
         dcp::save(dcp::StateDict{{"loss", 1.0 + get_rank()}}, "differs");
       }},
      {"whole tensors of rank 0 without saying so",
       [] { set_model_state_dict(sharded(), {}, {.broadcast_from_rank0 = true}); }},
      {"a state dict with other names",
       [] {
         set_model_state_dict(sharded(), {{"weight", torch::ones({2})}});
       }},
      {"an optimizer without a layout",
       [] {
         auto net = sharded();
         torch::optim::LBFGS optimizer(net->parameters());
         get_optimizer_state_dict(net, optimizer);
       }},
      {"float16 parameters under a scaler",
       [] {
         Net net(32, 16, 2);
         net->to(torch::kHalf);
         fully_shard(net);
         auto optimizer = sgd(net);
         GradScaler scaler;
         scaler.scale(net(rows().to(torch::kHalf)).sum()).backward();
         scaler.step(optimizer);
       }},
      {"symmetric memory", [] { fsdp_module(sharded()).set_symm_mem_for_comm("NCCL"); }},
      {"a module that was not sharded",
       [] {
         Net net(32, 16, 2);
         fsdp_module(net);
       }},
  };
}

}  // namespace faults
