// labels: ranks
// backends: gloo, shm
// What fully_shard makes of each parameter at once, and ways of giving parameters their values afterwards.

#include <algorithm>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::DTensor;
using fsdp2::fully_shard;
using fsdp2::is_dtensor;
using fsdp2::Placement;
using fsdp2::Shard;
using torch::Tensor;

Tensor local_of(const Tensor& param) { return DTensor(param.detach()).to_local(); }

/// An odd width, a buffer, and values that differ from any constant.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int64_t dim, int64_t factor = 3) {
    in_proj = register_module("in_proj", linear(dim, factor * dim, true));
    out_proj = register_module("out_proj", linear(factor * dim, dim));
    buffer = register_buffer("buffer", torch::empty({dim}));
    if (!buffer.is_meta()) reset_parameters();
  }
  void reset_parameters() { torch::nn::init::normal_(buffer); }
  Tensor forward(const Tensor& x) { return torch::tanh(out_proj(torch::tanh(in_proj(x)))) + buffer; }
  Linear in_proj{nullptr}, out_proj{nullptr};
  Tensor buffer;
};
FSDP2_MODULE(Mlp);

struct PairImpl : torch::nn::Module {
  explicit PairImpl(int64_t dim, int64_t factor = 3) {
    first = register_module("first", Mlp(dim, factor));
    second = register_module("second", Mlp(dim, factor));
  }
  Tensor forward(const Tensor& x) { return second(first(x)); }
  Mlp first{nullptr}, second{nullptr};
};
FSDP2_MODULE(Pair);

void shard_pair(Pair& pair, const fsdp2::FullyShardOptions& options = {}) {
  fully_shard(pair->first, options);
  fully_shard(pair->second, options);
  fully_shard(pair, options);
}

/// One step on this rank's rows and on the whole batch; gradients, then updated values.
void expect_steps_like_whole(Pair& pair, Pair& reference, int rank, int64_t dim, double tolerance) {
  const int size = fsdp2::get_world_size();
  torch::optim::Adam optimizer(pair->parameters(), torch::optim::AdamOptions(1e-2));
  torch::optim::Adam expected(reference->parameters(), torch::optim::AdamOptions(1e-2));
  for (int step = 0; step < 2; ++step) {
    torch::manual_seed(30 + step);
    const Tensor x = torch::randn({2 * size, dim});
    pair(x.narrow(0, 2 * rank, 2)).pow(2).mean().backward();
    reference(x).pow(2).mean().backward();
    for (const auto& named : reference->named_parameters()) {
      const Tensor& grad = pair->named_parameters()[named.key()].grad();
      ASSERT_TRUE(grad.defined()) << named.key();
      EXPECT_LE(max_difference(whole(grad), named.value().grad()), tolerance) << named.key() << " step " << step;
    }
    for (auto* each : {&optimizer, &expected}) {
      each->step();
      each->zero_grad();
    }
  }
}

// ----- what a parameter becomes ------------------------------------------------------------------------------------

void expect_chunks(int rank) {
  const int size = fsdp2::get_world_size();
  const auto mesh = fsdp2::init_device_mesh(torch::kCPU, {size});
  for (const bool shared : {false, true}) {
    Pair pair(3);
    if (shared) {
      pair->first->in_proj = Linear(pair->first->replace_module("in_proj", pair->second->in_proj.ptr()));
    }
    std::vector<Tensor> params = pair->parameters(), originals;
    for (const Tensor& param : params) originals.push_back(param.detach().clone());
    fsdp2::reset_counters();
    fully_shard(pair);
    const auto counters = fsdp2::counters();
    EXPECT_EQ(counters.all_gathers + counters.broadcasts + counters.all_reduces, 0);
    EXPECT_EQ(counters.unsharded_bytes, 0);
    for (size_t i = 0; i < params.size(); ++i) {
      ASSERT_TRUE(is_dtensor(params[i])) << i;
      const DTensor sharded(params[i].detach());
      EXPECT_TRUE(sharded.device_mesh() == mesh) << i;
      EXPECT_EQ(sharded.placements(), std::vector<Placement>{Shard{0}}) << i;
      EXPECT_EQ(sharded.sizes(), originals[i].sizes()) << i;
      EXPECT_EQ(sharded.strides(), originals[i].strides()) << i;
      EXPECT_TRUE(params[i].requires_grad()) << i;
      const std::vector<Tensor> chunks = originals[i].chunk(size);
      const Tensor local = sharded.to_local();
      EXPECT_TRUE(local.is_contiguous()) << i;
      if (rank < static_cast<int>(chunks.size())) {
        EXPECT_EQ(max_difference(local, chunks[rank]), 0) << i;
      } else {
        EXPECT_EQ(local.numel(), 0) << i;
      }
    }
  }
}

RANKS_TEST(InitOptions, EveryParameterIsTheChunkOfItsRankOnTwo, 2) { expect_chunks(rank); }
RANKS_TEST(InitOptions, EveryParameterIsTheChunkOfItsRankOnFour, 4) { expect_chunks(rank); }

RANKS_TEST(InitOptions, ShardsAreCutFromEachRanksOwnValues, 2) {
  Linear layer = linear(2, 4);
  {
    torch::NoGradGuard no_grad;
    layer->weight.fill_(rank);
  }
  fully_shard(layer);
  EXPECT_EQ(max_difference(whole(layer->weight), torch::tensor({0., 0., 1., 1.}).view({4, 1}).expand({4, 2})), 0);
}

RANKS_TEST(InitOptions, AModuleWithoutParametersGetsHooksAndCasts, 2) {
  struct PlainImpl : torch::nn::Module {
    Tensor forward(const Tensor& x) {
      seen = x.scalar_type();
      return x * 2;
    }
    at::ScalarType seen{};
  };
  auto plain = std::make_shared<PlainImpl>();
  auto handle = fully_shard(plain, {.mp_policy = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kDouble}});
  EXPECT_TRUE(handle.param_fqns().empty());
  EXPECT_EQ(fsdp2::call(plain, torch::ones({2})).scalar_type(), torch::kDouble);
  EXPECT_EQ(plain->seen, torch::kBFloat16);
  handle.unshard();
  handle.unshard_async().wait();
  handle.reshard();
  EXPECT_FALSE(handle.is_unsharded());
}

RANKS_TEST(InitOptions, AParameterWithoutElementsIsTaken, 2) {
  struct HollowImpl : torch::nn::Module {
    HollowImpl() {
      none = register_parameter("none", torch::empty({0, 3}));
      some = register_parameter("some", torch::ones({3}));
    }
    Tensor forward(const Tensor& x) { return (x * some).sum() + none.sum(); }
    Tensor none, some;
  };
  auto hollow = std::make_shared<HollowImpl>();
  fully_shard(hollow);
  EXPECT_EQ(local_of(hollow->none).sizes(), (std::vector<int64_t>{0, 3}));
  fsdp2::call(hollow, torch::full({3}, rank + 1.0)).backward();
  EXPECT_EQ(max_difference(whole(hollow->some.grad()), torch::full({3}, 1.5)), 0);
}

// ----- values afterwards -------------------------------------------------------------------------------------------

RANKS_TEST(InitOptions, MetaModelsOfEvenUnevenAndEmptyShardsTrain, 4) {
  for (const int64_t dim : {8, 3, 1}) {
    for (const bool mixed : {false, true}) {
      torch::manual_seed(5);
      Pair reference(dim, 1);
      Pair pair{nullptr};
      {
        fsdp2::MetaDeviceGuard meta;  // also while sharding: meshes and groups are made on real devices
        pair = Pair(dim, 1);
        fsdp2::FullyShardOptions options;
        if (mixed) options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
        shard_pair(pair, options);
      }
      for (const Tensor& param : pair->parameters()) EXPECT_TRUE(param.is_meta());
      fsdp2::to_empty(pair, torch::kCPU);
      for (const auto& named : pair->named_parameters()) {
        EXPECT_TRUE(named.value().is_cpu()) << named.key();
        const int64_t rows = named.value().size(0), chunk = (rows + 3) / 4;
        EXPECT_EQ(local_of(named.value()).size(0), std::clamp(rows - rank * chunk, int64_t{0}, chunk)) << named.key();
      }
      {
        torch::NoGradGuard no_grad;
        for (Tensor& param : pair->parameters()) param.fill_(1337);
      }
      torch::manual_seed(5);
      fsdp2::reset_parameters(pair);
      for (const auto& named : reference->named_parameters()) {
        const Tensor now = whole(pair->named_parameters()[named.key()]);
        EXPECT_EQ(max_difference(now, named.value().detach()), 0) << named.key() << " " << dim;
      }
      for (const auto& named : reference->named_buffers()) {
        EXPECT_EQ(max_difference(pair->named_buffers()[named.key()], named.value()), 0) << named.key();
      }
      expect_steps_like_whole(pair, reference, rank, dim, mixed ? 3e-2 : 1e-5);
    }
  }
}

RANKS_TEST(InitOptions, AFullStateOnRankZeroReachesAMetaModel, 4) {
  torch::manual_seed(20 + rank);
  Pair reference(6);  // only rank 0's values count
  Pair pair{nullptr};
  {
    fsdp2::MetaDeviceGuard meta;
    pair = Pair(6);
  }
  shard_pair(pair);
  fsdp2::dcp::StateDict state;
  const auto originals = reference->named_parameters();
  for (const auto& named : pair->named_parameters()) {
    const DTensor sharded(named.value().detach());
    const Tensor full = rank == 0 ? originals[named.key()].detach() : torch::zeros(named.value().sizes());
    state[named.key()] = fsdp2::distribute_tensor(full, sharded.device_mesh(), sharded.placements()).tensor();
  }
  for (const auto& named : reference->named_buffers()) {
    Tensor buffer = named.value();
    fsdp2::broadcast(buffer, 0);
    state[named.key()] = buffer.clone();
  }
  fsdp2::set_model_state_dict(pair, state);
  for (Tensor& param : reference->parameters()) {
    Tensor data = param.detach();
    fsdp2::broadcast(data, 0);
  }
  for (const auto& named : pair->named_parameters()) {
    EXPECT_TRUE(is_dtensor(named.value()) && named.value().is_cpu()) << named.key();
    EXPECT_EQ(max_difference(whole(named.value()), originals[named.key()].detach()), 0) << named.key();
  }
  expect_steps_like_whole(pair, reference, rank, 6, 1e-5);
}

/// A parameter computed from others after they got their values.
struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    first = register_module("first", linear(3, 3));
    second = register_module("second", linear(3, 3));
    norms = register_parameter("norms", torch::empty({3}));
  }
  Tensor forward(const Tensor& x) { return second(first(x)).sum() + norms.sum() * 2; }
  Linear first{nullptr}, second{nullptr};
  Tensor norms;
};
FSDP2_MODULE(Normed);

RANKS_TEST(InitOptions, AParameterReplacedBeforeTheFirstForwardIsTakenOver, 2) {
  for (const bool as_dtensor : {false, true}) {
    Normed model{nullptr};
    {
      fsdp2::MetaDeviceGuard meta;
      model = Normed();
    }
    fully_shard(model->first);
    fully_shard(model->second);
    auto root = fully_shard(model);
    torch::optim::SGD optimizer(model->parameters(), 1.0);
    fsdp2::to_empty(model, torch::kCPU);
    Tensor norms;
    {
      torch::NoGradGuard no_grad;
      model->first->weight.fill_(3);
      model->second->weight.fill_(4);
      norms = whole(model->first->weight).pow(2).sum(1).sqrt() + whole(model->second->weight).pow(2).sum(1).sqrt();
      const auto mesh = DTensor(model->norms.detach()).device_mesh();
      const Tensor sharded = fsdp2::distribute_tensor(norms, mesh, {Shard{0}}).tensor();
      if (as_dtensor) {
        model->norms.set_data(sharded);
      } else {
        model->norms.copy_(sharded);
      }
    }
    const Tensor x = torch::ones({1, 3});
    const Tensor loss = model(x);
    EXPECT_NEAR(loss.item<double>(), 3 * 9 * 12 + 2 * norms.sum().item<double>(), 1e-3);
    loss.backward();
    optimizer.step();
    EXPECT_LE(max_difference(whole(model->norms), norms - 2), 1e-5);  // the parameter that the optimizer holds
    EXPECT_EQ(root.param_fqns(), std::vector<std::string>{"norms"});
  }
}

RANKS_TEST(InitOptions, APlainTensorInPlaceOfAShardIsNamed, 2) {
  Linear layer = linear(4, 4);
  fully_shard(layer);
  EXPECT_FSDP2_ERROR(layer->weight.set_data(torch::ones({4, 4})), kUsage, "mixes 'weight'");
  EXPECT_TRUE(is_dtensor(layer->weight));
}

// ----- parameters, gradients and optimizer state on the CPU --------------------------------------------------------

RANKS_TEST(InitOptions, OffloadedParametersTrainLikeWhole, 2) {
  for (const bool pin : {false, true}) {
    int notes = 0;
    fsdp2::set_log_sink(
        [&](fsdp2::LogLevel, const std::string& text) { notes += text.find("pin") != std::string::npos; });
    torch::manual_seed(6);
    Pair reference(5), pair(5);
    copy_state(*pair, *reference);
    shard_pair(pair, {.offload_policy = fsdp2::CPUOffloadPolicy{.pin_memory = pin}});
    expect_steps_like_whole(pair, reference, rank, 5, 1e-5);
    fsdp2::set_log_sink({});
    EXPECT_EQ(notes, pin ? 1 : 0);  // said once, where pinning was asked for and cannot be
    for (const auto& named : pair->named_parameters()) {
      EXPECT_TRUE(is_dtensor(named.value()) && named.value().is_cpu()) << named.key();
    }
  }
}

}  // namespace
