// labels: ranks
// backends: gloo, shm
// shard_placement_fn: any dimension, and several meshes in one module.

#include <algorithm>
#include <map>
#include <set>

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
using fsdp2::ShardPlacement;
using torch::Tensor;
using Chosen = std::optional<ShardPlacement>;

/// Sizes that four ranks divide, the largest at every position.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    tall = register_parameter("tall", torch::randn({8, 4}) * 0.3);
    wide = register_parameter("wide", torch::randn({4, 12}) * 0.3);
    deep = register_parameter("deep", torch::randn({3, 4, 16}) * 0.3);
    bias = register_parameter("bias", torch::randn({4}));
  }
  Tensor forward(const Tensor& x) {
    const Tensor hidden = torch::tanh(torch::matmul(torch::matmul(x, tall.t()), torch::cat({wide, wide}, 0)));
    return torch::matmul(hidden, deep.flatten(1).sum(1).repeat({4}).view({12, 1}) * bias.view({1, 4})) + x;
  }
  Tensor tall, wide, deep, bias;
};
FSDP2_MODULE(Wide);

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    for (int i = 0; i < 2; ++i) layers.push_back(register_module("layer" + std::to_string(i), Wide()));
    scale = register_parameter("scale", torch::randn({4, 4}) * 0.3);
  }
  Tensor forward(Tensor x) {
    for (Wide& layer : layers) x = layer(x);
    return torch::matmul(x, scale);
  }
  std::vector<Wide> layers;
  Tensor scale;
};
FSDP2_MODULE(Model);

Chosen largest_dim(const std::string&, const Tensor& param) {
  const auto sizes = param.sizes();
  return ShardPlacement{Shard{std::max_element(sizes.begin(), sizes.end()) - sizes.begin()}};
}

std::map<std::string, int64_t> dims_of(torch::nn::Module& module) {
  std::map<std::string, int64_t> dims;
  for (const auto& named : module.named_parameters()) {
    const DTensor param(named.value().detach());
    EXPECT_EQ(param.placements().size(), 1u) << named.key();
    dims[named.key()] = std::get<Shard>(param.placements().at(0)).dim;
  }
  return dims;
}

/// The model and a copy of it, sharded.
std::pair<Model, Model> sharded_copy(const fsdp2::FullyShardOptions& options) {
  torch::manual_seed(2);
  Model reference, model;
  copy_state(*model, *reference);
  for (Wide& layer : model->layers) fully_shard(layer, options);
  fully_shard(model, options);
  return {reference, model};
}

void expect_trains_like_whole(Model& model, Model& reference, int rank) {
  const int size = fsdp2::get_world_size();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  torch::optim::AdamW expected(reference->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < 3; ++step) {
    torch::manual_seed(40 + step);
    const Tensor x = torch::randn({2 * size, 4});
    model(x.narrow(0, 2 * rank, 2)).pow(2).mean().backward();
    reference(x).pow(2).mean().backward();
    for (const auto& named : reference->named_parameters()) {
      const Tensor param = model->named_parameters()[named.key()];
      ASSERT_TRUE(is_dtensor(param.grad())) << named.key();
      EXPECT_EQ(DTensor(param.grad()).placements(), DTensor(param.detach()).placements()) << named.key();
      EXPECT_LE(max_difference(whole(param.grad()), named.value().grad()), 1e-5) << named.key() << " step " << step;
    }
    for (auto* each : {&optimizer, &expected}) {
      each->step();
      each->zero_grad();
    }
  }
  for (const auto& named : reference->named_parameters()) {
    const Tensor now = whole(model->named_parameters()[named.key()]);
    EXPECT_LE(max_difference(now, named.value().detach()), 1e-4) << named.key();
  }
}

RANKS_TEST(ShardPlacement, TheLargestDimOfEveryParameter, 4) {
  auto [reference, model] = sharded_copy({.shard_placement_fn = largest_dim});
  const auto dims = dims_of(*model);
  for (const std::string layer : {"layer0.", "layer1."}) {
    EXPECT_EQ(dims.at(layer + "tall"), 0);
    EXPECT_EQ(dims.at(layer + "wide"), 1);
    EXPECT_EQ(dims.at(layer + "deep"), 2);
    EXPECT_EQ(dims.at(layer + "bias"), 0);
  }
  for (const auto& named : reference->named_parameters()) {
    const Tensor param = model->named_parameters()[named.key()];
    EXPECT_EQ(param.sizes(), named.value().sizes()) << named.key();
    EXPECT_EQ(param.strides(), named.value().strides()) << named.key();
    const Tensor local = DTensor(param.detach()).to_local();
    EXPECT_EQ(max_difference(local, named.value().detach().chunk(4, dims.at(named.key()))[rank]), 0) << named.key();
    EXPECT_TRUE(local.is_contiguous()) << named.key();
    EXPECT_EQ(max_difference(whole(param), named.value().detach()), 0) << named.key();
  }
  expect_trains_like_whole(model, reference, rank);
}

RANKS_TEST(ShardPlacement, NegativeDimsCountFromTheEnd, 4) {
  auto [reference, model] =
      sharded_copy({.shard_placement_fn = [](const std::string& fqn, const Tensor& param) -> Chosen {
        if (fqn == "deep") return ShardPlacement{Shard{-2}};
        if (fqn == "tall") return ShardPlacement{Shard{-param.dim()}};
        return ShardPlacement{Shard{-1}};
      }});
  const auto dims = dims_of(*model);
  EXPECT_EQ(dims.at("layer1.deep"), 1);
  EXPECT_EQ(dims.at("layer1.tall"), 0);
  EXPECT_EQ(dims.at("layer1.wide"), 1);
  EXPECT_EQ(dims.at("layer1.bias"), 0);
  EXPECT_EQ(dims.at("scale"), 1);
  expect_trains_like_whole(model, reference, rank);
}

RANKS_TEST(ShardPlacement, NamesAreThoseSeenFromTheModulePassed, 2) {
  std::set<std::string> seen;
  const auto note = [&](const std::string& fqn, const Tensor& param) -> Chosen {
    EXPECT_FALSE(is_dtensor(param)) << fqn;
    seen.insert(fqn);
    return std::nullopt;  // Shard(0)
  };
  Model model;
  fully_shard(model->layers[0], {.shard_placement_fn = note});
  EXPECT_EQ(seen, (std::set<std::string>{"tall", "wide", "deep", "bias"}));
  seen.clear();
  fully_shard(model, {.shard_placement_fn = note});
  EXPECT_EQ(seen, (std::set<std::string>{"layer1.tall", "layer1.wide", "layer1.deep", "layer1.bias", "scale"}));
  for (const auto& [fqn, dim] : dims_of(*model)) EXPECT_EQ(dim, 0) << fqn;

  seen.clear();
  Model again;
  fully_shard({again->layers[0], again->layers[1]}, {.shard_placement_fn = note});
  EXPECT_EQ(seen,
            (std::set<std::string>{"0.tall", "0.wide", "0.deep", "0.bias", "1.tall", "1.wide", "1.deep", "1.bias"}));
}

RANKS_TEST(ShardPlacement, DimZeroMayBeUnevenWhereOthersAreSplit, 4) {
  struct OddImpl : torch::nn::Module {
    OddImpl() {
      rows = register_parameter("rows", torch::randn({5, 8}));
      columns = register_parameter("columns", torch::randn({5, 8}));
      few = register_parameter("few", torch::randn({1}));
    }
    Tensor forward(const Tensor& x) { return (torch::matmul(x, rows.t()) * torch::matmul(x, columns.t()) * few).sum(); }
    Tensor rows, columns, few;
  };
  torch::manual_seed(8);
  auto reference = std::make_shared<OddImpl>(), model = std::make_shared<OddImpl>();
  copy_state(*model, *reference);
  fully_shard(model, {.shard_placement_fn = [](const std::string& fqn, const Tensor&) -> Chosen {
                return fqn == "columns" ? Chosen(ShardPlacement{Shard{1}}) : std::nullopt;
              }});
  EXPECT_EQ(DTensor(model->rows.detach()).to_local().size(0), rank < 2 ? 2 : rank == 2 ? 1 : 0);
  EXPECT_EQ(DTensor(model->columns.detach()).to_local().sizes(), (std::vector<int64_t>{5, 2}));
  const Tensor x = torch::randn({4, 8});
  fsdp2::call(model, x.narrow(0, rank, 1)).backward();
  (reference->forward(x) / 4).backward();
  for (const auto& named : reference->named_parameters()) {
    const Tensor param = model->named_parameters()[named.key()];
    EXPECT_LE(max_difference(whole(param), named.value().detach()), 0) << named.key();
    EXPECT_LE(max_difference(whole(param.grad()), named.value().grad()), 1e-4) << named.key();
  }
}

// ----- values afterwards -------------------------------------------------------------------------------------------

/// Draws its values anew, so that it can be made on meta.
struct DrawnImpl : torch::nn::Module {
  DrawnImpl() {
    first = register_module("first", linear(4, 8, true));
    second = register_module("second", linear(8, 4));
    table = register_parameter("table", torch::empty({4, 4}));
    if (!table.is_meta()) reset_parameters();
  }
  void reset_parameters() { torch::nn::init::orthogonal_(table); }
  Tensor forward(const Tensor& x) { return torch::matmul(second(torch::tanh(first(x))), table); }
  Linear first{nullptr}, second{nullptr};
  Tensor table;
};
FSDP2_MODULE(Drawn);

RANKS_TEST(ShardPlacement, ValuesArriveOnEveryLayout, 4) {
  const auto grid = fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
  for (const bool hsdp : {false, true}) {
    for (const bool offload : {false, true}) {
      const std::string where = c10::str("hsdp ", hsdp, " offload ", offload, " ");
      torch::manual_seed(21);
      Drawn reference;
      Drawn model{nullptr};
      {
        fsdp2::MetaDeviceGuard meta;
        model = Drawn();
      }
      fsdp2::FullyShardOptions options{.shard_placement_fn = [](const std::string&, const Tensor& param) -> Chosen {
        return ShardPlacement{Shard{param.dim() - 1}};
      }};
      if (hsdp) options.mesh = grid;
      if (offload) options.offload_policy = fsdp2::CPUOffloadPolicy{.pin_memory = false};
      fully_shard(model->first, options);
      fully_shard(model->second, options);
      auto root = fully_shard(model, options);
      const auto expect_equal = [&](const char* when) {
        for (const auto& named : reference->named_parameters()) {
          const Tensor param = model->named_parameters()[named.key()];
          EXPECT_TRUE(is_dtensor(param)) << where << when << named.key();
          EXPECT_EQ(param.scalar_type(), named.value().scalar_type()) << where << when;
          EXPECT_EQ(max_difference(whole(param), named.value().detach()), 0) << where << when << named.key();
        }
        const Tensor x = torch::ones({2, 4}, reference->table.options().requires_grad(false));
        EXPECT_LE(max_difference(model(x).detach(), reference(x).detach()), 1e-6) << where << when;
        root.reshard();
      };
      fsdp2::to_empty(model, torch::kCPU);
      torch::manual_seed(21);
      fsdp2::reset_parameters(model);
      expect_equal("reset ");
      for (auto* each : {&model, &reference}) (*each)->to(torch::kDouble);
      expect_equal("converted ");
      auto state = fsdp2::get_model_state_dict(model);
      for (auto& [fqn, value] : state) {
        const DTensor old(value.tensor());
        torch::manual_seed(22);
        const Tensor drawn = torch::randn(old.sizes(), torch::kDouble);
        state[fqn] = fsdp2::distribute_tensor(drawn, old.device_mesh(), old.placements()).tensor();
        torch::NoGradGuard no_grad;
        reference->named_parameters()[fqn].copy_(drawn);
      }
      fsdp2::set_model_state_dict(model, state);
      expect_equal("loaded ");
      torch::NoGradGuard no_grad;
      for (auto* each : {&model, &reference}) {
        for (Tensor& param : (*each)->parameters()) param.mul_(0.5).add_(1);
      }
      expect_equal("edited ");
    }
  }
}

// ----- several meshes in one module --------------------------------------------------------------------------------

/// Every rank holds the experts of its place on the "ep" axis; the rest is the same on all.
struct MoeImpl : torch::nn::Module {
  explicit MoeImpl(int64_t place) {
    torch::manual_seed(11);
    router = register_parameter("router", torch::randn({6, 6}) * 0.3);
    torch::manual_seed(12 + place);
    experts = register_parameter("experts", torch::randn({3, 6, 6}) * 0.3);
    torch::manual_seed(13);
    out = register_parameter("out", torch::randn({6, 6}) * 0.3);
  }
  Tensor forward(const Tensor& x) {
    Tensor hidden = torch::tanh(torch::matmul(x, router));
    for (int64_t i = 0; i < experts.size(0); ++i) hidden = hidden + torch::tanh(torch::matmul(hidden, experts[i]));
    return torch::matmul(hidden, out);
  }
  Tensor router, experts, out;
};
FSDP2_MODULE(Moe);

/// On four ranks, "ep" and "efsdp" of two each: the experts are sharded over "efsdp" only.
void expect_moe_trains_like_whole(int rank, const fsdp2::ReshardAfterForward& reshard, int64_t expert_dim) {
  const auto all = fsdp2::init_device_mesh(torch::kCPU, {4}, {"fsdp"});
  const auto grid = fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"ep", "efsdp"});
  const auto experts_mesh = grid["efsdp"];
  const int64_t place = grid.get_local_rank("ep");
  Moe moe(place);
  auto handle = fully_shard(moe, {.mesh = all,
                                  .reshard_after_forward = reshard,
                                  .shard_placement_fn = [&](const std::string& fqn, const Tensor&) -> Chosen {
                                    if (fqn == "experts") return ShardPlacement{Shard{expert_dim}, experts_mesh};
                                    return std::nullopt;
                                  }});
  EXPECT_TRUE(DTensor(moe->router.detach()).device_mesh() == all);
  EXPECT_TRUE(DTensor(moe->experts.detach()).device_mesh() == experts_mesh);
  EXPECT_EQ(DTensor(moe->experts.detach()).placements(), std::vector<Placement>{Shard{expert_dim}});
  auto fqns = handle.param_fqns();
  std::sort(fqns.begin(), fqns.end());
  EXPECT_EQ(fqns, (std::vector<std::string>{"experts", "out", "router"}));

  // One whole model per place, each fed the batches of the two ranks there.
  Moe references[] = {Moe(0), Moe(1)};
  torch::optim::SGD optimizer(moe->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    fsdp2::reset_counters();
    Tensor router_grad = torch::zeros({6, 6}), out_grad = torch::zeros({6, 6}), experts_grad;
    torch::manual_seed(60 + step);
    const Tensor x = torch::randn({4, 2, 6});
    moe(x[rank]).pow(2).mean().backward();
    EXPECT_EQ(fsdp2::counters().reduce_scatters, 2);  // one per mesh
    for (int64_t p = 0; p < 2; ++p) {
      Moe& reference = references[p];
      for (int64_t r = 2 * p; r < 2 * p + 2; ++r) reference(x[r]).pow(2).mean().backward();
      router_grad += reference->router.grad() / 4;
      out_grad += reference->out.grad() / 4;
      if (p == place) experts_grad = reference->experts.grad().clone() / 2;  // averaged over its own mesh
    }
    EXPECT_LE(max_difference(whole(moe->router.grad()), router_grad), 1e-5) << step;
    EXPECT_LE(max_difference(whole(moe->out.grad()), out_grad), 1e-5) << step;
    EXPECT_LE(max_difference(whole(moe->experts.grad()), experts_grad), 1e-5) << step;
    for (Moe& reference : references) {
      torch::NoGradGuard no_grad;
      reference->router.sub_(router_grad * 0.1);
      reference->out.sub_(out_grad * 0.1);
      reference->experts.sub_(reference->experts.grad() * 0.05);
      reference->zero_grad();
    }
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_LE(max_difference(whole(moe->experts), references[place]->experts.detach()), 1e-5) << step;
    EXPECT_LE(max_difference(whole(moe->router), references[place]->router.detach()), 1e-5) << step;
  }
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
}

RANKS_TEST(ShardPlacement, ExpertsOnAMeshOfTheirOwn, 4) {
  expect_moe_trains_like_whole(rank, std::nullopt, 0);  // three experts on two ranks: uneven
  expect_moe_trains_like_whole(rank, true, 1);
  expect_moe_trains_like_whole(rank, false, 2);
}

RANKS_TEST(ShardPlacement, MeshesOfOneRankAndOfAll, 2) {
  torch::manual_seed(3);
  const auto alone = fsdp2::init_device_mesh(torch::kCPU, {2, 1}, {"each", "one"})["one"];
  Model reference, model;
  copy_state(*model, *reference);
  const fsdp2::FullyShardOptions options{.shard_placement_fn = [&](const std::string& fqn, const Tensor&) -> Chosen {
    if (fqn.find("wide") != std::string::npos) return ShardPlacement{Shard{0}, alone};
    return std::nullopt;
  }};
  for (Wide& layer : model->layers) fully_shard(layer, options);
  fully_shard(model, options);
  const Tensor x = torch::randn({4, 4});
  model(x.narrow(0, 2 * rank, 2)).sum().backward();
  (reference(x).sum() / 2).backward();
  Model mine;
  copy_state(*mine, *reference);
  mine(x.narrow(0, 2 * rank, 2)).sum().backward();
  for (const auto& named : reference->named_parameters()) {
    const bool on_one_rank = named.key().find("wide") != std::string::npos;
    const Tensor& expected = on_one_rank ? mine->named_parameters()[named.key()].grad() : named.value().grad();
    const Tensor param = model->named_parameters()[named.key()];
    EXPECT_LE(max_difference(whole(param.grad()), expected), 1e-4) << named.key();
    EXPECT_EQ(DTensor(param.detach()).device_mesh().size(), on_one_rank ? 1 : 2) << named.key();
  }
}

}  // namespace
