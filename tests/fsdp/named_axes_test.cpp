// labels: ranks
// backends: gloo, shm
// dp_mesh_dims: the mesh has all axes, parameters are DTensors on it, names say which axes are data-parallel.

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::DeviceMesh;
using fsdp2::DTensor;
using fsdp2::fully_shard;
using fsdp2::FullyShardOptions;
using fsdp2::init_device_mesh;
using fsdp2::Placement;
using fsdp2::Replicate;
using fsdp2::Shard;
using torch::Tensor;
using Names = std::vector<std::string>;

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    in_proj = register_module("in_proj", linear(4, 6, true));
    out_proj = register_module("out_proj", linear(6, 4));
  }
  Tensor forward(const Tensor& x) { return out_proj(torch::tanh(in_proj(x))); }
  Linear in_proj{nullptr}, out_proj{nullptr};
};
FSDP2_MODULE(Mlp);

FullyShardOptions options(const DeviceMesh& mesh, Names shard, Names replicate,
                          fsdp2::ReshardAfterForward reshard = std::nullopt) {
  return {.mesh = mesh,
          .reshard_after_forward = reshard,
          .dp_mesh_dims = fsdp2::DataParallelMeshDims{.shard = std::move(shard), .replicate = std::move(replicate)}};
}

void replicate_all(Mlp& model, const DeviceMesh& mesh) {
  for (const auto& named : model->named_parameters()) {
    fsdp2::distribute_parameter(model, named.key(), mesh,
                                std::vector<Placement>(static_cast<size_t>(mesh.ndim()), Replicate{}));
  }
}

/// Trains on `parts` batches, this rank on batch `part`; ranks with equal parts see equal rows.
void expect_trains(const FullyShardOptions& chosen, int64_t parts, int64_t part,
                   const std::vector<Placement>& placements, const char* where) {
  torch::manual_seed(3);
  Mlp reference, model;
  copy_state(*model, *reference);
  replicate_all(model, *chosen.mesh);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  fully_shard(model->in_proj, chosen);
  fully_shard(model->out_proj, chosen);
  fully_shard(model, chosen);
  torch::optim::AdamW expected(reference->parameters(), torch::optim::AdamWOptions(1e-2));
  for (const Tensor& param : model->parameters()) {
    EXPECT_EQ(DTensor(param.detach()).placements(), placements) << where;
  }
  for (int step = 0; step < 3; ++step) {
    const Tensor all = torch::randn({parts, 2, 4});
    model(all[part]).pow(2).mean().backward();
    reference(all).pow(2).mean().backward();
    for (const auto& named : reference->named_parameters()) {
      const Tensor param = model->named_parameters()[named.key()];
      ASSERT_TRUE(param.grad().defined()) << where << named.key();
      EXPECT_EQ(DTensor(param.grad()).placements(), placements) << where << named.key();
      EXPECT_LE(max_difference(whole(param.grad()), named.value().grad()), 1e-6) << where << named.key();
    }
    for (auto* each : {&optimizer, &expected}) {
      each->step();
      each->zero_grad();
    }
    for (const auto& named : reference->named_parameters()) {
      const Tensor now = whole(model->named_parameters()[named.key()]);
      EXPECT_LE(max_difference(now, named.value().detach()), 1e-5) << where << named.key() << step;
    }
  }
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0) << where;
}

RANKS_TEST(NamedAxes, ShardedReplicatedAndBoth, 4) {
  const DeviceMesh line = init_device_mesh(torch::kCPU, {4}, {"dp"});
  expect_trains(options(line, {"dp"}, {}), 4, rank, {Shard{0}}, "sharded ");
  expect_trains(options(line, {"dp"}, {}, false), 4, rank, {Shard{0}}, "kept ");
  const DeviceMesh grid = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
  expect_trains(options(grid, {"shard"}, {"replicate"}), 4, rank, {Replicate{}, Shard{0}}, "both ");
  const DeviceMesh turned = init_device_mesh(torch::kCPU, {2, 2}, {"shard", "replicate"});
  expect_trains(options(turned, {"shard"}, {"replicate"}), 4, rank, {Shard{0}, Replicate{}}, "turned ");
  fsdp2::reset_counters();
  expect_trains(options(line, {}, {"dp"}), 4, rank, {Replicate{}}, "replicated ");
  EXPECT_EQ(fsdp2::counters().all_gathers, 0);
  EXPECT_EQ(fsdp2::counters().reduce_scatters, 0);
  EXPECT_EQ(fsdp2::counters().all_reduces, 3 * 2);  // per step, one for each group
}

RANKS_TEST(NamedAxes, SeveralAxesOfOneKindAreOne, 4) {
  const DeviceMesh grid = init_device_mesh(torch::kCPU, {2, 2}, {"hosts", "local"});
  expect_trains(options(grid, {"hosts", "local"}, {}), 4, rank, {Shard{0}}, "joined ");
  const DeviceMesh cube = init_device_mesh(torch::kCPU, {2, 1, 2}, {"a", "b", "c"});
  expect_trains(options(cube, {"b", "c"}, {"a"}), 4, rank, {Replicate{}, Shard{0}}, "joined and replicated ");
  expect_trains(options(cube, {"c"}, {"a", "b"}), 4, rank, {Replicate{}, Shard{0}}, "replicated over two ");
}

RANKS_TEST(NamedAxes, OtherAxesStayAsTheyAre, 4) {
  const DeviceMesh mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "other"});
  expect_trains(options(mesh, {"dp"}, {}), 2, rank / 2, {Shard{0}, Replicate{}}, "first ");
  expect_trains(options(mesh, {"other"}, {}), 2, rank % 2, {Replicate{}, Shard{0}}, "second ");
}

/// Columns of the output over "tp" by hand: each rank computes with its own rows of the weight.
RANKS_TEST(NamedAxes, AWeightThatIsCutOnAnotherAxisToo, 4) {
  const DeviceMesh mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
  for (const int64_t dim : {0, 1}) {
    torch::manual_seed(5);
    Linear reference = linear(4, 8), layer = linear(4, 8);
    copy_state(*layer, *reference);
    fsdp2::distribute_parameter(layer, "weight", mesh, {Replicate{}, Shard{dim}});
    fully_shard(layer, options(mesh, {"dp"}, {}));
    const std::vector<Placement> expected = dim == 0 ? std::vector<Placement>{fsdp2::StridedShard{0, 2}, Shard{0}}
                                                     : std::vector<Placement>{Shard{0}, Shard{1}};
    EXPECT_EQ(DTensor(layer->weight.detach()).placements(), expected);
    EXPECT_EQ(max_difference(whole(layer->weight), reference->weight.detach()), 0) << dim;
    const Tensor all = torch::randn({2, 3, 4}), x = all[rank / 2];
    const Tensor mine = dim == 0 ? x : x.chunk(2, 1)[rank % 2];  // rows of the output, or terms of it
    const Tensor out = layer(mine);
    const Tensor weight = reference->weight.detach().chunk(2, dim)[rank % 2];
    EXPECT_LE(max_difference(out.detach(), torch::matmul(mine, weight.t())), 1e-6) << dim;
    out.sum().backward();
    (reference(all).sum() / 2).backward();
    EXPECT_LE(max_difference(whole(layer->weight.grad()), reference->weight.grad()), 1e-5) << dim;
    EXPECT_EQ(DTensor(layer->weight.grad()).placements(), expected) << dim;
  }
}

RANKS_TEST(NamedAxes, WhatDoesNotGoTogetherIsSaid, 4) {
  const DeviceMesh mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
  const auto refused = [&](FullyShardOptions chosen, fsdp2::ErrorCode code, const char* text) {
    Linear layer = linear(4, 4);
    fsdp2::distribute_parameter(layer, "weight", mesh, {Replicate{}, Replicate{}});
    try {
      fully_shard(layer, chosen);
      ADD_FAILURE() << "no error: " << text;
    } catch (const fsdp2::Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
    EXPECT_EQ(DTensor(layer->weight.detach()).placements(), (std::vector<Placement>{Replicate{}, Replicate{}}));
  };
  constexpr auto kInvalid = fsdp2::ErrorCode::kInvalidArgument;
  refused(options(mesh, {"dp"}, {"dp"}), kInvalid, "twice");
  refused(options(mesh, {"tp", "dp"}, {}), kInvalid, "order");
  FullyShardOptions meshless = options(mesh, {"dp"}, {});
  meshless.mesh = std::nullopt;
  refused(meshless, kInvalid, "needs the mesh");
  FullyShardOptions placed = options(mesh, {"dp"}, {});
  placed.shard_placement_fn = [&](const std::string&, const Tensor&) {
    return fsdp2::ShardPlacement{Shard{0}, mesh["dp"]};
  };
  refused(placed, kInvalid, "does not go together with dp_mesh_dims");
  refused({.mesh = mesh["dp"]}, fsdp2::ErrorCode::kUnsupported, "dp_mesh_dims");
}

}  // namespace
