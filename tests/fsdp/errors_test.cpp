// labels: ranks
// backends: gloo, shm
// What a user may get wrong in a call of fully_shard or of a method: refused at once, with the fix in the text.

#include <cmath>
#include <limits>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::DeviceMesh;
using fsdp2::fsdp_module;
using fsdp2::fully_shard;
using fsdp2::FullyShardOptions;
using fsdp2::init_device_mesh;
using fsdp2::is_dtensor;
using fsdp2::Shard;
using fsdp2::ShardPlacement;
using torch::Tensor;

/// Refused, and the module is as it was: another call with good options takes it.
#define EXPECT_REFUSED(options, error_code, text)                        \
  do {                                                                   \
    Linear refused = linear(4, 4, true);                                 \
    EXPECT_FSDP2_ERROR(fully_shard(refused, options), error_code, text); \
    EXPECT_FALSE(is_dtensor(refused->weight));                           \
    EXPECT_FALSE(fsdp2::is_fsdp_module(refused));                        \
    EXPECT_NO_THROW(fully_shard(refused));                               \
  } while (false)

FullyShardOptions with_mesh(const DeviceMesh& mesh) { return {.mesh = mesh}; }
FullyShardOptions with_reshard(int ranks) { return {.reshard_after_forward = ranks}; }
FullyShardOptions with_placement(int64_t dim, std::optional<DeviceMesh> mesh = {}) {
  return {.shard_placement_fn = [=](const std::string&, const Tensor&) { return ShardPlacement{Shard{dim}, mesh}; }};
}

// ----- modules -----------------------------------------------------------------------------------------------------

RANKS_TEST(Errors, ContainersWithoutAForward, 2) {
  torch::nn::ModuleList list(linear(2, 2), linear(2, 2));
  EXPECT_FSDP2_ERROR(fully_shard(list), kInvalidArgument, "each of its elements");
  torch::nn::ModuleDict dict(
      std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{{"a", linear(2, 2).ptr()}});
  EXPECT_FSDP2_ERROR(fully_shard(dict), kInvalidArgument, "each of its elements");
  Linear layer = linear(2, 2);
  EXPECT_FSDP2_ERROR(fully_shard({layer, list}), kInvalidArgument, "each of its elements");
  EXPECT_FALSE(is_dtensor(layer->weight));
}

RANKS_TEST(Errors, ListsWithNothingOrSomethingTwice, 2) {
  EXPECT_FSDP2_ERROR(fully_shard(std::vector<fsdp2::ModuleRef>{}), kInvalidArgument, "empty");
  Linear first = linear(2, 2), second = linear(2, 2);
  EXPECT_FSDP2_ERROR(fully_shard({first, second, first}), kUsage, "twice");
  EXPECT_FALSE(is_dtensor(first->weight) || is_dtensor(second->weight));
  fully_shard(first);
  EXPECT_FSDP2_ERROR(fully_shard({second, first}), kUsage, "twice");
  EXPECT_FALSE(is_dtensor(second->weight));
  EXPECT_FSDP2_ERROR(fully_shard(first), kUsage, "twice");
}

RANKS_TEST(Errors, ModulesThatNobodyHolds, 2) {
  torch::nn::LinearImpl on_stack(2, 2);
  EXPECT_FSDP2_ERROR(fully_shard(on_stack), kUsage, "shared_ptr");
}

RANKS_TEST(Errors, ACopyOfAShardedModuleIsNoModuleOfItsOwn, 2) {
  torch::manual_seed(0);
  Linear layer = linear(3, 3);
  const Tensor before = layer->weight.detach().clone();
  auto handle = fully_shard(layer);
  std::shared_ptr<torch::nn::Module> copy;
  try {
    copy = layer->clone();
  } catch (const c10::Error&) {
    copy = nullptr;
  }
  if (copy) {
    auto twin = std::dynamic_pointer_cast<torch::nn::LinearImpl>(copy);
    EXPECT_FSDP2_ERROR(fsdp2::call(twin, torch::ones({1, 3})), kUsage, "weight");
    EXPECT_FALSE(fsdp2::is_fsdp_module(twin));
  }
  EXPECT_TRUE(whole(layer->weight).equal(before));
  EXPECT_NO_THROW(layer(torch::ones({1, 3})).sum().backward());
}

RANKS_TEST(Errors, ParametersRegisteredAfterSharding, 2) {
  struct GrowingImpl : torch::nn::Module {
    GrowingImpl() { inner = register_module("inner", linear(2, 2)); }
    Tensor forward(const Tensor& x) {
      Tensor out = inner(x);
      for (const auto& own : named_parameters(/*recurse=*/false)) out = out + own.value();
      return adapter ? out + adapter(x) : out;
    }
    Linear inner{nullptr}, adapter{nullptr};
  };
  const Tensor x = torch::full({1, 2}, rank + 1.0);
  auto late_parameter = std::make_shared<GrowingImpl>();
  fully_shard(late_parameter);
  late_parameter->register_parameter("late", torch::ones({2}));
  EXPECT_FSDP2_ERROR(fsdp2::call(late_parameter, x).sum().backward(), kUsage, "late");
  auto late_module = std::make_shared<GrowingImpl>();
  fully_shard(late_module);
  late_module->adapter = Linear(late_module->register_module("adapter", linear(2, 2).ptr()));
  EXPECT_FSDP2_ERROR(fsdp2::call(late_module, x).sum().backward(), kUsage, "adapter.weight");
  auto other_module = std::make_shared<GrowingImpl>();
  fully_shard(other_module);
  other_module->inner = Linear(other_module->replace_module("inner", linear(2, 2).ptr()));
  EXPECT_FSDP2_ERROR(fsdp2::call(other_module, x).sum().backward(), kUsage, "inner.weight");
  // Frozen or ignored ones need no reduction.
  auto allowed = std::make_shared<GrowingImpl>();
  const Tensor ignored = torch::ones({2}).requires_grad_();
  fully_shard(allowed, {.ignored_params = {ignored}});
  allowed->register_parameter("frozen", torch::ones({2}), /*requires_grad=*/false);
  allowed->register_parameter("ignored", ignored);
  EXPECT_NO_THROW(fsdp2::call(allowed, x).sum().backward());
}

// ----- meshes ------------------------------------------------------------------------------------------------------

RANKS_TEST(Errors, MeshesOfTheWrongForm, 2) {
  EXPECT_REFUSED(with_mesh(init_device_mesh(torch::kCPU, {2, 1, 1})), kInvalidArgument, "3 axes");
  EXPECT_REFUSED(with_mesh(init_device_mesh(torch::kCPU, {1, 2})), kInvalidArgument, "names");
  if (!torch::hasCUDA()) {
    EXPECT_REFUSED(with_mesh(init_device_mesh(torch::kCUDA, {2})), kInvalidArgument, "cuda");
  }
  const DeviceMesh part(torch::kCPU, torch::tensor({int64_t{1}}));
  if (rank == 0) {
    Linear layer = linear(2, 2);
    EXPECT_FSDP2_ERROR(fully_shard(layer, {.mesh = part}), kUsage, "outside the mesh");
  }
}

FullyShardOptions with_dims(const DeviceMesh& mesh, std::vector<std::string> shard, std::vector<std::string> replicate,
                            fsdp2::ReshardAfterForward reshard = std::nullopt) {
  return {.mesh = mesh,
          .reshard_after_forward = reshard,
          .dp_mesh_dims = fsdp2::DataParallelMeshDims{.shard = std::move(shard), .replicate = std::move(replicate)}};
}

/// The weight laid out by hand, the bias removed.
Linear placed(const DeviceMesh& mesh, std::vector<fsdp2::Placement> placements) {
  Linear layer = linear(4, 4);
  fsdp2::distribute_parameter(layer, "weight", mesh, std::move(placements));
  return layer;
}

RANKS_TEST(Errors, NamedAxesOfDataParallelism, 4) {
  const fsdp2::Replicate all;
  const DeviceMesh mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
  const DeviceMesh nameless = init_device_mesh(torch::kCPU, {2, 2});
  const DeviceMesh other = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "other"});
  Linear good = placed(mesh, {all, all});
  EXPECT_FSDP2_ERROR(fully_shard(good, with_dims(mesh, {}, {})), kInvalidArgument, "shard");
  EXPECT_FSDP2_ERROR(fully_shard(good, with_dims(mesh, {"pp"}, {})), kInvalidArgument, "pp");
  EXPECT_FSDP2_ERROR(fully_shard(good, with_dims(mesh, {"dp"}, {"pp"})), kInvalidArgument, "pp");
  EXPECT_FSDP2_ERROR(fully_shard(good, with_dims(mesh, {"dp"}, {}, 2)), kUnsupported, "reshard_after_forward");
  Linear of_nameless = placed(nameless, {all, all});
  EXPECT_FSDP2_ERROR(fully_shard(of_nameless, with_dims(nameless, {"dp"}, {})), kInvalidArgument, "names");
  Linear plain = linear(4, 4);
  EXPECT_FSDP2_ERROR(fully_shard(plain, with_dims(mesh, {"dp"}, {})), kInvalidArgument, "weight");
  EXPECT_FALSE(is_dtensor(plain->weight));
  Linear elsewhere = placed(other, {all, all});
  EXPECT_FSDP2_ERROR(fully_shard(elsewhere, with_dims(mesh, {"dp"}, {})), kInvalidArgument, "weight");
  Linear cut = placed(mesh, {Shard{0}, all});
  EXPECT_FSDP2_ERROR(fully_shard(cut, with_dims(mesh, {"dp"}, {})), kInvalidArgument, "weight");
  EXPECT_NO_THROW(fully_shard(good, with_dims(mesh, {"dp"}, {})));
}

// ----- reshard_after_forward, shard_placement_fn, policies ---------------------------------------------------------

RANKS_TEST(Errors, NumbersThatDoNotDivideTheShardSize, 4) {
  for (const int ranks : {0, -1, 3, 5, 8}) {
    EXPECT_REFUSED(with_reshard(ranks), kInvalidArgument, "divide the shard size 4");
  }
  FullyShardOptions hsdp{.mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"})};
  hsdp.reshard_after_forward = 4;  // the shard size is 2
  EXPECT_REFUSED(hsdp, kInvalidArgument, "divide the shard size 2");
  FullyShardOptions columns = with_placement(1);
  columns.reshard_after_forward = 2;
  Linear layer = linear(4, 4);
  EXPECT_FSDP2_ERROR(fully_shard(layer, columns), kUnsupported, "sharded on dim 0");
  EXPECT_FALSE(is_dtensor(layer->weight));
}

RANKS_TEST(Errors, PlacementsThatDoNotFit, 2) {
  EXPECT_REFUSED(with_placement(1), kInvalidArgument, "bias");  // it has one dimension
  EXPECT_REFUSED(with_placement(-2), kInvalidArgument, "bias");
  Linear odd = linear(3, 4);
  EXPECT_FSDP2_ERROR(fully_shard(odd, with_placement(1)), kUnsupported, "even");
  EXPECT_FSDP2_ERROR(fully_shard(odd, with_placement(-1)), kUnsupported, "weight");
  EXPECT_FSDP2_ERROR(fully_shard(odd, with_placement(2)), kInvalidArgument, "weight");
  EXPECT_FSDP2_ERROR(fully_shard(odd, with_placement(-3)), kInvalidArgument, "weight");
  const DeviceMesh cube = init_device_mesh(torch::kCPU, {2, 1, 1});
  EXPECT_FSDP2_ERROR(fully_shard(odd, with_placement(0, cube)), kInvalidArgument, "3 axes");
  const DeviceMesh of_gpus = init_device_mesh(torch::kCUDA, {2});
  EXPECT_FSDP2_ERROR(fully_shard(odd, with_placement(0, of_gpus)), kInvalidArgument, "devices");
  EXPECT_FALSE(is_dtensor(odd->weight));
  EXPECT_NO_THROW(fully_shard(odd, with_placement(0)));
}

RANKS_TEST(Errors, PoliciesWithoutSense, 2) {
  EXPECT_REFUSED((FullyShardOptions{.mp_policy = {.param_dtype = torch::kLong}}), kInvalidArgument, "param_dtype");
  EXPECT_REFUSED((FullyShardOptions{.mp_policy = {.reduce_dtype = torch::kInt}}), kInvalidArgument, "reduce_dtype");
  EXPECT_REFUSED((FullyShardOptions{.mp_policy = {.output_dtype = torch::kBool}}), kInvalidArgument, "output_dtype");
  EXPECT_REFUSED((FullyShardOptions{.mp_policy = {.buffer_dtype = torch::kByte}}), kInvalidArgument, "buffer_dtype");
  EXPECT_REFUSED((FullyShardOptions{.ignored_params = {Tensor()}}), kInvalidArgument, "ignored_params");
}

// ----- tied parameters without a common group ----------------------------------------------------------------------

struct UserImpl : torch::nn::Module {
  explicit UserImpl(const Tensor& tied) { weight = register_parameter("weight", tied); }
  Tensor forward(const Tensor& x) { return torch::matmul(x, weight); }
  Tensor weight;
};
FSDP2_MODULE(User);
struct TwoUsersImpl : torch::nn::Module {
  TwoUsersImpl() {
    first = register_module("first", User(torch::ones({2, 2})));
    second = register_module("second", User(first->weight));
  }
  Tensor forward(const Tensor& x) { return second(first(x)); }
  User first{nullptr}, second{nullptr};
};
FSDP2_MODULE(TwoUsers);

RANKS_TEST(Errors, TiedParametersOfTwoGroupsWithoutACommonOne, 2) {
  const Tensor x = torch::ones({1, 2});
  TwoUsers model;
  const auto use = [&] {  // at the second call, or where the tree is first seen as a whole
    fully_shard(model->first);
    fully_shard(model->second);
    fsdp2::call(model, x);
  };
  EXPECT_FSDP2_ERROR(use(), kUsage, "no fully_shard call covers all its users");
  TwoUsers again;
  fully_shard(again->first);
  fully_shard(again->second);
  fully_shard(again);  // the common one
  EXPECT_EQ(fsdp2::call(again, x).sum().item<double>(), 8);
}

// ----- outputs that are edited ---------------------------------------------------------------------------------------

RANKS_TEST(Errors, AnOutputEditedInPlaceIsRightOrNamed, 2) {
  struct ViewerImpl : torch::nn::Module {
    explicit ViewerImpl(bool returns_view) : view(returns_view) { inner = register_module("inner", linear(3, 4)); }
    Tensor forward(const Tensor& x) {
      const Tensor out = inner(torch::tanh(x));
      return view ? out.view({-1}) : out;
    }
    Linear inner{nullptr};
    bool view;
  };
  for (const bool view : {false, true}) {
    torch::manual_seed(2);
    auto reference = std::make_shared<ViewerImpl>(view), model = std::make_shared<ViewerImpl>(view);
    copy_state(*model, *reference);
    auto handle = fully_shard(model, {.reshard_after_forward = true});
    const Tensor all = torch::randn({2, 3}), mine = all.narrow(0, rank, 1);
    const auto loss_of = [](Tensor out) {
      out.mul_(2).add_(1);
      return out.pow(2).sum();
    };
    try {
      loss_of(fsdp2::call(model, mine)).backward();
      (loss_of(reference->forward(all)) / 2).backward();
      EXPECT_LE(max_difference(whole(model->inner->weight.grad()), reference->inner->weight.grad()), 1e-5) << view;
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("inner.weight"), std::string::npos) << error.what();
      handle.reset_iter_state();
    }
    EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0) << view;
    model->zero_grad();
    reference->zero_grad();
    fsdp2::call(model, mine).sum().backward();  // usable again
    (reference->forward(all).sum() / 2).backward();
    EXPECT_LE(max_difference(whole(model->inner->weight.grad()), reference->inner->weight.grad()), 1e-5) << view;
  }
}

// ----- methods -----------------------------------------------------------------------------------------------------

RANKS_TEST(Errors, ArgumentsOfMethods, 2) {
  Linear layer = linear(2, 2);
  auto handle = fully_shard(layer);
  for (const double factor : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_FSDP2_ERROR(handle.set_gradient_divide_factor(factor), kInvalidArgument, "factor");
  }
  EXPECT_FSDP2_ERROR(handle.set_reduce_scatter_max_input_buffers(0), kInvalidArgument, "at least 1");
  EXPECT_FSDP2_ERROR(handle.set_reduce_scatter_max_input_buffers(-3), kInvalidArgument, "at least 1");
  EXPECT_FSDP2_ERROR(handle.set_symm_mem_for_comm("NCCL"), kUnsupported, "CUDA");
  handle.set_custom_all_gather(nullptr);  // the library's own
  handle.set_custom_reduce_scatter(nullptr);
  layer(torch::full({1, 2}, rank + 1.0)).sum().backward();  // none of it has changed anything
  EXPECT_EQ(max_difference(whole(layer->weight.grad()), torch::full({2, 2}, 1.5)), 0);
}

RANKS_TEST(Errors, StreamsOfAllReduceHooks, 2) {
  const c10::Stream stream(c10::Stream::DEFAULT, torch::kCPU);
  Linear two_axes = linear(2, 2), one_axis = linear(2, 2);
  auto hsdp = fully_shard(two_axes, {.mesh = init_device_mesh(torch::kCPU, {2, 1}, {"replicate", "shard"})});
  EXPECT_FSDP2_ERROR(hsdp.set_all_reduce_hook([](Tensor&) {}, stream), kInvalidArgument, "stream");
  EXPECT_NO_THROW(hsdp.set_all_reduce_hook([](Tensor&) {}));
  auto fsdp = fully_shard(one_axis);
  EXPECT_FSDP2_ERROR(fsdp.set_all_reduce_hook({}, stream), kInvalidArgument, "stream");
}

struct CopyGather : fsdp2::AllGather {
  Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return torch::empty(sizes, options);
  }
  c10::intrusive_ptr<c10d::Work> operator()(Tensor& out, const Tensor& in, const fsdp2::ProcessGroup& group) override {
    fsdp2::all_gather_into_tensor(out, in, group);
    return {};  // done
  }
};

RANKS_TEST(Errors, CustomCommunicationOfSeveralMeshesOrWithAnAllocator, 2) {
  const DeviceMesh alone = init_device_mesh(torch::kCPU, {2, 1}, {"each", "one"})["one"];
  Linear layer = linear(2, 2, true);
  auto handle = fully_shard(
      layer, {.shard_placement_fn = [&](const std::string& fqn, const Tensor&) {
        return fqn == "bias" ? std::optional<ShardPlacement>(ShardPlacement{Shard{0}, alone}) : std::nullopt;
      }});
  EXPECT_FSDP2_ERROR(handle.set_custom_all_gather(std::make_shared<CopyGather>()), kUnsupported, "mesh");
  EXPECT_FSDP2_ERROR(handle.set_all_reduce_hook([](Tensor&) {}), kUnsupported, "mesh");

  Linear single = linear(2, 2);
  auto custom = fully_shard(single);
  custom.set_custom_all_gather(std::make_shared<CopyGather>());
  EXPECT_FSDP2_ERROR(custom.set_allocate_memory_from_process_group_for_comm(true), kUsage, "custom");
  Linear reversed = linear(2, 2);
  auto allocating = fully_shard(reversed);
  allocating.set_allocate_memory_from_process_group_for_comm(true);
  EXPECT_NO_THROW(allocating.set_custom_all_gather(std::make_shared<CopyGather>()));
  EXPECT_NO_THROW(reversed(torch::ones({1, 2})).sum().backward());
}

RANKS_TEST(Errors, WhatOnlyTheRootMayDo, 2) {
  Net net(1);
  shard(net);
  const Tensor tokens = torch::zeros({1, 3}, torch::kLong);
  EXPECT_NO_THROW(fsdp_module(net).reset_iter_state());  // before the first forward: nothing to do
  net(tokens);
  EXPECT_FSDP2_ERROR(fsdp_module(net->blocks[0]).reset_iter_state(), kUsage, "outermost module");
  EXPECT_NO_THROW(fsdp_module(net).reset_iter_state());
}

RANKS_TEST(Errors, HandlesOfModulesThatAreGone, 2) {
  Linear layer = linear(2, 2), other = linear(2, 2);
  auto gone = fully_shard(layer), here = fully_shard(other);
  layer = nullptr;
  EXPECT_FSDP2_ERROR(gone.unshard(), kUsage, "gone");
  EXPECT_FSDP2_ERROR(gone.set_is_last_backward(true), kUsage, "gone");
  EXPECT_FSDP2_ERROR(gone.param_fqns(), kUsage, "gone");
  EXPECT_FSDP2_ERROR(here.set_modules_to_forward_prefetch({gone}), kUsage, "gone");
  EXPECT_FSDP2_ERROR(here.set_modules_to_backward_prefetch({gone}), kUsage, "gone");
  EXPECT_FSDP2_ERROR(fsdp2::share_comm_ctx({here, gone}), kUsage, "gone");
  EXPECT_NO_THROW(fsdp2::share_comm_ctx({}));
}

RANKS_TEST(Errors, HooksOnWhatHasNoFinalGradient, 2) {
  Linear layer = linear(2, 2, true);
  fully_shard(layer, {.ignored_params = {layer->bias}});
  const auto nothing = [](Tensor&) {};
  EXPECT_FSDP2_ERROR(fsdp2::register_post_accumulate_grad_hook(Tensor(), nothing), kInvalidArgument, "parameter");
  EXPECT_FSDP2_ERROR(fsdp2::register_post_accumulate_grad_hook(layer->bias * 2, nothing), kInvalidArgument, "leaf");
  EXPECT_FSDP2_ERROR(fsdp2::register_post_accumulate_grad_hook(layer->weight, {}), kInvalidArgument, "a function");
}

}  // namespace
