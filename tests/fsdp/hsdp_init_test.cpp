// labels: ranks
// backends: gloo, shm
// Meshes of two axes, replicate and shard, and meshes made of groups: where values and gradients come to lie.

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::DeviceMesh;
using fsdp2::DTensor;
using fsdp2::fully_shard;
using fsdp2::Placement;
using fsdp2::ProcessGroup;
using torch::Tensor;

Tensor local_of(const Tensor& tensor) { return DTensor(tensor.detach()).to_local(); }

/// Two projections without bias, ReLU after each.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int64_t dim) {
    in_proj = register_module("in_proj", linear(dim, 4 * dim));
    out_proj = register_module("out_proj", linear(4 * dim, dim));
  }
  Tensor forward(const Tensor& x) { return torch::relu(out_proj(torch::relu(in_proj(x)))); }
  Linear in_proj{nullptr}, out_proj{nullptr};
};
FSDP2_MODULE(Mlp);

void shard_mlp(Mlp& mlp, const fsdp2::FullyShardOptions& options) {
  fully_shard(mlp->in_proj, options);
  fully_shard(mlp->out_proj, options);
  fully_shard(mlp, options);
}

/// The groups of this rank on a grid of `size` columns, without a mesh: along its row, and along its column.
std::pair<ProcessGroup, ProcessGroup> row_and_column(int rank, int size) {
  ProcessGroup row, column;
  for (int first = 0; first < 4; first += size) {
    std::vector<int> ranks;
    for (int i = 0; i < size; ++i) ranks.push_back(first + i);
    const ProcessGroup group = fsdp2::new_group(ranks);
    if (rank / size * size == first) row = group;
  }
  for (int first = 0; first < size; ++first) {
    std::vector<int> ranks;
    for (int i = first; i < 4; i += size) ranks.push_back(i);
    const ProcessGroup group = fsdp2::new_group(ranks);
    if (rank % size == first) column = group;
  }
  return {row, column};
}

RANKS_TEST(HsdpInit, ParametersAreReplicatedOverTheFirstAxisAndCutOverTheSecond, 4) {
  const std::pair<std::vector<int64_t>, std::vector<std::string>> meshes[] = {
      {{2, 2}, {"replicate", "shard"}},
      {{2, 2}, {"shard", "replicate"}},  // the order decides, not the names
      {{4, 1}, {"a", "b"}},
      {{1, 4}, {"a", "b"}}};
  for (const auto& [shape, names] : meshes) {
    const auto mesh = fsdp2::init_device_mesh(torch::kCPU, shape, names);
    Linear layer = linear(3, 5, true);
    {
      torch::NoGradGuard no_grad;
      layer->weight.copy_(torch::arange(15).view({5, 3}));
      layer->bias.fill_(1);
    }
    const Tensor original = layer->weight.detach().clone();
    fully_shard(layer, {.mesh = mesh});
    const DTensor weight(layer->weight.detach());
    EXPECT_TRUE(weight.device_mesh() == mesh);
    EXPECT_EQ(weight.placements(), (std::vector<Placement>{fsdp2::Replicate{}, fsdp2::Shard{0}}));
    EXPECT_EQ(weight.sizes(), original.sizes());
    const int64_t column = mesh.get_local_rank(1);
    const std::vector<Tensor> chunks = original.chunk(shape[1]);
    if (column < static_cast<int64_t>(chunks.size())) {
      EXPECT_EQ(max_difference(weight.to_local(), chunks[column]), 0);
    } else {
      EXPECT_EQ(weight.to_local().numel(), 0);
    }
    fsdp2::reset_counters();
    const Tensor out = layer(torch::full({1, 3}, rank + 1.0));
    out.sum().backward();
    // Averaged over all four ranks, on every replica.
    const DTensor grad(layer->weight.grad());
    EXPECT_EQ(grad.placements(), weight.placements());
    EXPECT_EQ(max_difference(grad.full_tensor(), torch::full({5, 3}, 2.5)), 0) << names[0] << shape[0];
    EXPECT_EQ(max_difference(whole(layer->bias.grad()), torch::ones({5})), 0);
    const auto counters = fsdp2::counters();
    EXPECT_EQ(counters.reduce_scatters, shape[1] > 1 ? 1 : 0);
    EXPECT_EQ(counters.all_gathers, shape[1] > 1 ? 1 : 0);
    if (shape[0] > 1) {
      EXPECT_EQ(counters.all_reduces, 1);
    }
  }
}

RANKS_TEST(HsdpInit, AMeshOfAnExistingGroupTrainsLikeTheMeshItself, 4) {
  const auto grid = fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
  const DeviceMesh dp = grid["dp"];
  const DeviceMesh from = DeviceMesh::from_group(dp.get_group(0), torch::kCPU, {"dp"});
  EXPECT_TRUE(from.ranks().equal(dp.ranks()));
  EXPECT_EQ(from.get_coordinate(), dp.get_coordinate());
  EXPECT_EQ(from.get_group(0).get(), dp.get_group(0).get());
  torch::manual_seed(42);
  Mlp reference(8), model(8);
  copy_state(*model, *reference);
  shard_mlp(reference, {.mesh = dp});
  shard_mlp(model, {.mesh = from});
  torch::manual_seed(50 + grid.get_local_rank("dp"));
  const Tensor x = torch::randn({4, 8});
  const Tensor expected = reference(x).sum(), loss = model(x).sum();
  expected.backward();
  loss.backward();
  EXPECT_EQ(max_difference(loss.detach(), expected.detach()), 0);
  for (const auto& named : model->named_parameters()) {
    const Tensor other = reference->named_parameters()[named.key()];
    EXPECT_EQ(max_difference(local_of(named.value()), local_of(other)), 0) << named.key();
    EXPECT_EQ(max_difference(local_of(named.value().grad()), local_of(other.grad())), 0) << named.key();
    EXPECT_TRUE(DTensor(named.value().grad()).device_mesh().ranks().equal(dp.ranks())) << named.key();
    EXPECT_GT(whole(other.grad()).abs().max().item<double>(), 0) << named.key();
  }
}

RANKS_TEST(HsdpInit, AMeshOfTwoGroupsTrainsLikeTheMeshItself, 4) {
  const auto direct = fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
  const auto [shard_group, replicate_group] = row_and_column(rank, 2);
  const auto mesh = DeviceMesh::from_group({replicate_group, shard_group}, torch::kCPU, torch::arange(4).view({2, 2}),
                                           {"replicate", "shard"});
  EXPECT_TRUE(mesh.ranks().equal(direct.ranks()));
  EXPECT_EQ(mesh.get_coordinate(), direct.get_coordinate());
  for (const char* name : {"replicate", "shard"}) {
    EXPECT_EQ(fsdp2::get_process_group_ranks(mesh[name].get_group(0)),
              fsdp2::get_process_group_ranks(direct[name].get_group(0)));
  }
  torch::manual_seed(42);
  Mlp whole_model(6), reference(6), model(6);
  copy_state(*reference, *whole_model);
  copy_state(*model, *whole_model);
  shard_mlp(reference, {.mesh = direct});
  shard_mlp(model, {.mesh = mesh});
  const Tensor all = torch::randn({8, 6}), x = all.narrow(0, 2 * rank, 2);
  whole_model(all).pow(2).mean().backward();
  reference(x).pow(2).mean().backward();
  model(x).pow(2).mean().backward();
  for (const auto& named : whole_model->named_parameters()) {
    const Tensor expected = reference->named_parameters()[named.key()], param = model->named_parameters()[named.key()];
    EXPECT_EQ(max_difference(local_of(param), local_of(expected)), 0) << named.key();
    EXPECT_EQ(max_difference(local_of(param.grad()), local_of(expected.grad())), 0) << named.key();
    EXPECT_LE(max_difference(whole(param.grad()), named.value().grad()), 1e-6) << named.key();
  }
}

RANKS_TEST(HsdpInit, ReplicasBecomeEqualByABroadcastOfTheUsers, 4) {
  const auto mesh = fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
  torch::manual_seed(rank);
  Net net(2);
  fsdp2::register_buffer(net, "buf", torch::randn({5}));
  shard(net, {.mesh = mesh});
  std::vector<Tensor> locals = net->buffers();
  for (const Tensor& param : net->parameters()) locals.push_back(local_of(param));
  const bool first_replica = mesh.get_local_rank("replicate") == 0;
  const ProcessGroup replicas = mesh.get_group("replicate");
  const auto largest_difference = [&] {
    double largest = 0;
    for (const Tensor& local : locals) {
      if (local.numel() == 0) continue;
      Tensor low = local.clone(), high = local.clone();
      fsdp2::all_reduce(low, fsdp2::ReduceOp::MIN, replicas);
      fsdp2::all_reduce(high, fsdp2::ReduceOp::MAX, replicas);
      largest = std::max(largest, max_difference(low, high));
    }
    return largest;
  };
  if (!first_replica) {
    torch::NoGradGuard no_grad;
    for (Tensor& param : net->parameters()) param.fill_(1337);
    for (Tensor& buffer : net->buffers()) buffer.fill_(1337);
  }
  EXPECT_GT(largest_difference(), 1000);
  const int source = fsdp2::get_process_group_ranks(replicas)[0];
  for (Tensor& local : locals) fsdp2::broadcast(local, source, replicas);
  EXPECT_EQ(largest_difference(), 0);
  torch::manual_seed(7 + rank);
  const Tensor loss = loss_of(net, torch::randint(NetImpl::kVocab, {2, 4}));
  EXPECT_LT(loss.item<double>(), 100);  // 1337 is gone from the computation too
  loss.backward();
  locals.clear();
  for (const Tensor& param : net->parameters()) locals.push_back(local_of(param.grad()));
  EXPECT_EQ(largest_difference(), 0);
}

RANKS_TEST(HsdpInit, AHookMayReduceOverAGroupOfItsOwn, 4) {
  const auto [intra, inter] = row_and_column(rank, 2);
  const auto mesh = DeviceMesh::from_group(intra, torch::kCPU, {"shard"});
  Mlp model(10);
  {
    torch::NoGradGuard no_grad;  // all zeros in the first pair of ranks, ones and twos in the second
    model->in_proj->weight.fill_(1.0 * (rank / 2));
    model->out_proj->weight.fill_(2.0 * (rank / 2));
  }
  auto handle = fully_shard(model, {.mesh = mesh});
  int calls = 0;
  int64_t numel = 0;
  const ProcessGroup pairs = inter;
  handle.set_all_reduce_hook([&](Tensor& reduced) {
    ++calls;
    EXPECT_FALSE(fsdp2::is_dtensor(reduced));
    numel += reduced.numel();
    fsdp2::all_reduce(reduced, fsdp2::ReduceOp::AVG, pairs);
  });
  const Tensor x = torch::arange(10, torch::kFloat).view({1, 10}).requires_grad_();
  model(x).sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(numel, 2 * 5 * 40);  // this rank's part of both gradients
  // The hidden values are 0 and 45; halved by the average with the zeros.
  EXPECT_EQ(max_difference(local_of(model->out_proj->weight.grad()), torch::full({5, 40}, 22.5)), 0);
  const Tensor expected = torch::arange(0, 100, 10, torch::kFloat).repeat({20, 1});
  EXPECT_EQ(max_difference(local_of(model->in_proj->weight.grad()), expected), 0);

  // Taken off again, the gradient is that of the pair.
  handle.set_all_reduce_hook({});
  model->zero_grad();
  model(x).sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(max_difference(local_of(model->out_proj->weight.grad()), torch::full({5, 40}, 45.0 * (rank / 2))), 0);
}

RANKS_TEST(HsdpInit, AHookOnTwoAxesSeesTheSumOverBoth, 4) {
  const auto mesh = fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
  Linear layer = linear(2, 4);
  auto handle = fully_shard(layer, {.mesh = mesh});
  std::vector<double> seen;
  handle.set_all_reduce_hook([&](Tensor& reduced) {
    seen.push_back(reduced.max().item<double>());
    seen.push_back(reduced.min().item<double>());
    reduced.mul_(10);
  });
  layer(torch::full({1, 2}, rank + 1.0)).sum().backward();
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(seen[0], seen[1]);
  EXPECT_EQ(max_difference(whole(layer->weight.grad()), torch::full({4, 2}, 25)), 0);
}

}  // namespace
