// labels: ranks
// backends: gloo, shm
// Meta construction, to_empty and reset_parameters give the unsharded model's values, within bounded memory.

#include <fstream>

#include "fsdp/models.h"
#include "support/process_status.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

/// Writes its parameters in ways that need the whole tensor.
struct OrthogonalImpl : torch::nn::Module {
  OrthogonalImpl() {
    weight = register_parameter("weight", torch::empty({7, 5}));
    counted = register_parameter("counted", torch::empty({9}));
    table = fsdp2::register_buffer(*this, "table", torch::empty({4}), /*persistent=*/false);
    if (!weight.is_meta()) reset_parameters();
  }
  void reset_parameters() {
    torch::nn::init::orthogonal_(weight);
    float* data = counted.data_ptr<float>();
    for (int64_t i = 0; i < counted.numel(); ++i) data[i] = static_cast<float>(i);
    torch::NoGradGuard no_grad;
    table.copy_(torch::arange(4));
  }
  Tensor forward(const Tensor& x) { return torch::matmul(x, weight.t()) + counted.sum() + table.sum(); }
  Tensor weight, counted, table;
};
FSDP2_MODULE(Orthogonal);

/// Draws its own values in different ways.
struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    embed = register_module("embed", torch::nn::Embedding(13, 5));
    orthogonal = register_module("orthogonal", Orthogonal());
    conv = register_module("conv", torch::nn::Conv1d(3, 5, 2));
    norm = register_module("norm", torch::nn::BatchNorm1d(5));
    linear = register_module("linear", torch::nn::Linear(7, 3));
    xavier = register_parameter("xavier", torch::empty({5, 11}));
    normal = register_parameter("normal", torch::empty({1, 8}));  // fewer rows than ranks
    if (!xavier.is_meta()) reset_parameters();
  }
  void reset_parameters() {
    torch::nn::init::xavier_uniform_(xavier);
    torch::nn::init::normal_(normal, 1.0, 2.0);
  }
  Tensor forward(const Tensor& tokens) { return linear(orthogonal(embed(tokens))); }
  torch::nn::Embedding embed{nullptr};
  Orthogonal orthogonal{nullptr};
  torch::nn::Conv1d conv{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear linear{nullptr};
  Tensor xavier, normal;
};
FSDP2_MODULE(Model);

void expect_unsharded_values(int) {
  torch::manual_seed(7);
  Model expected;
  Model model = nullptr;
  {
    fsdp2::MetaDeviceGuard meta;
    model = Model();
  }
  for (const Tensor& param : model->parameters()) ASSERT_TRUE(param.is_meta());
  fsdp2::fully_shard(model->orthogonal);
  fsdp2::fully_shard(model);
  fsdp2::to_empty(model, torch::kCPU);
  torch::manual_seed(7);
  fsdp2::reset_parameters(model);
  const auto values = expected->named_parameters();
  for (const auto& named : model->named_parameters()) {
    EXPECT_TRUE(fsdp2::is_dtensor(named.value())) << named.key();
    EXPECT_EQ(max_difference(whole(named.value()), values[named.key()].detach()), 0) << named.key();
  }
  const auto buffers = expected->named_buffers();
  for (const auto& named : model->named_buffers()) {
    EXPECT_EQ(max_difference(named.value(), buffers[named.key()]), 0) << named.key();
  }
  EXPECT_LE(max_difference(model(torch::tensor({1, 2})).detach(), expected(torch::tensor({1, 2})).detach()), 1e-6);
}
RANKS_TEST(Init, ResetGivesTheUnshardedValuesOnOneRank, 1) { expect_unsharded_values(rank); }
RANKS_TEST(Init, ResetGivesTheUnshardedValuesOnTwoRanks, 2) { expect_unsharded_values(rank); }
RANKS_TEST(Init, ResetGivesTheUnshardedValuesOnThreeRanks, 3) { expect_unsharded_values(rank); }

/// Nothing of its own: writes the subtree.
struct ScalerImpl : torch::nn::Module {
  ScalerImpl() { linear = register_module("linear", torch::nn::Linear(4, 6)); }
  void reset_parameters() {
    torch::NoGradGuard no_grad;
    linear->weight.copy_(torch::arange(24).view({6, 4}));
    linear->bias.fill_(3);
  }
  Tensor forward(const Tensor& x) { return linear(x); }
  torch::nn::Linear linear{nullptr};
};
FSDP2_MODULE(Scaler);

RANKS_TEST(Init, AModuleWithNothingOfItsOwnWritesItsSubtree, 2) {
  Scaler scaler = nullptr;
  { fsdp2::MetaDeviceGuard meta; scaler = Scaler(); }
  fsdp2::fully_shard(scaler);
  fsdp2::to_empty(scaler, torch::kCPU);
  torch::manual_seed(0);
  fsdp2::reset_parameters(scaler);
  EXPECT_EQ(max_difference(whole(scaler->linear->weight), torch::arange(24).view({6, 4})), 0);
  EXPECT_EQ(max_difference(whole(scaler->linear->bias), torch::full({6}, 3)), 0);
}

/// Writes one of the tensors below it, and one of its own.
struct PartialImpl : torch::nn::Module {
  PartialImpl() {
    written = register_parameter("written", torch::full({5}, 2.0));
    kept = register_parameter("kept", torch::full({5}, 3.0));
  }
  void reset_parameters() { torch::nn::init::ones_(written); }
  Tensor written, kept;
};
FSDP2_MODULE(Partial);
struct OuterImpl : torch::nn::Module {
  OuterImpl() {
    inner = register_module("inner", Partial());
    linear = register_module("linear", torch::nn::Linear(3, 3));
  }
  void reset_parameters() { torch::nn::init::constant_(linear->bias, 7); }
  Partial inner{nullptr};
  torch::nn::Linear linear{nullptr};
};
FSDP2_MODULE(Outer);

RANKS_TEST(Init, WhatAResetLeavesAloneKeepsItsValues, 2) {
  Outer outer;
  fsdp2::fully_shard(outer->inner);
  fsdp2::fully_shard(outer);
  torch::manual_seed(3);
  fsdp2::reset_parameters(outer);
  torch::manual_seed(3);
  const torch::nn::Linear expected(3, 3);
  EXPECT_EQ(max_difference(whole(outer->inner->written), torch::ones({5})), 0);
  EXPECT_EQ(max_difference(whole(outer->inner->kept), torch::full({5}, 3)), 0);
  EXPECT_EQ(max_difference(whole(outer->linear->weight), expected->weight.detach()), 0);
  EXPECT_EQ(max_difference(whole(outer->linear->bias), torch::full({3}, 7)), 0);
}

struct SilentImpl : torch::nn::Module {  // nobody said how to write it
  SilentImpl() {
    weight = register_parameter("weight", torch::empty({4}));
    linear = register_module("linear", torch::nn::Linear(2, 2));
  }
  Tensor forward(const Tensor& x) { return linear(x) + weight.sum(); }
  Tensor weight;
  torch::nn::Linear linear{nullptr};
};

RANKS_TEST(Init, WhatCannotBeResetIsNamedAfterTheRest, 2) {
  std::shared_ptr<SilentImpl> model;
  { fsdp2::MetaDeviceGuard meta; model = std::make_shared<SilentImpl>(); }
  fsdp2::fully_shard(model);
  fsdp2::to_empty(model, torch::kCPU);
  torch::manual_seed(0);
  EXPECT_FSDP2_ERROR(fsdp2::reset_parameters(model), kUsage, "the root");
  EXPECT_LE(whole(model->linear->weight).abs().max().item<double>(), 1);  // the rest was written
  EXPECT_FSDP2_ERROR(fsdp2::call(model, torch::ones({1, 2})), kUsage, "parameters weight were given memory");
}

RANKS_TEST(Init, RanksWithDifferentSeedsAreTold, 2) {
  Linear layer = linear(4, 4);
  fsdp2::fully_shard(layer);
  torch::manual_seed(rank);
  EXPECT_FSDP2_ERROR(fsdp2::reset_parameters(layer), kUsage, "torch::manual_seed");
}

RANKS_TEST(Init, AnOptimizerMadeBeforeEverythingHoldsTheRightTensors, 2) {
  Linear layer{nullptr};
  { fsdp2::MetaDeviceGuard meta; layer = linear(3, 4); }
  torch::optim::SGD optimizer(layer->parameters(), 1.0);
  fsdp2::fully_shard(layer);
  fsdp2::to_empty(layer, torch::kCPU);
  { torch::NoGradGuard no_grad; layer->weight.fill_(5); }
  layer(torch::ones({1, 3})).sum().backward();
  optimizer.step();
  EXPECT_EQ(max_difference(whole(layer->weight), torch::full({4, 3}, 4)), 0);
}

RANKS_TEST(Init, InferenceModeFirstDoesNotSpoilTraining, 2) {
  Net net(2);
  shard(net);
  const Tensor tokens = torch::zeros({1, 3}, torch::kLong);
  {
    c10::InferenceMode inference;
    net(tokens);
  }
  loss_of(net, tokens).backward();
  torch::optim::SGD(net->parameters(), 0.1).step();
  EXPECT_FALSE(net->head->weight.is_inference());
  EXPECT_TRUE(net->head->weight.grad().defined());
}

// ----- memory -----

/// Most resident memory above what is resident before and what stays after, in MiB.
double extra_mib(const std::function<void()>& action) {
  const int64_t before = process_status("VmRSS");
  std::ofstream("/proc/self/clear_refs") << "5";
  action();
  const int64_t after = process_status("VmRSS"), peak = process_status("VmHWM");
  return static_cast<double>(peak - std::max(before, after)) / 1024;
}

struct ManyImpl : torch::nn::Module {
  explicit ManyImpl(const std::vector<int64_t>& rows) {
    for (size_t i = 0; i < rows.size(); ++i) {
      layers.push_back(
          register_module("l" + std::to_string(i), linear(1024, rows[i])));
    }
  }
  Tensor forward(Tensor x) { return x; }
  std::vector<Linear> layers;
};

void expect_bounded(const std::vector<int64_t>& rows, double largest_mib) {
  constexpr double kSlack = 12;
  std::shared_ptr<ManyImpl> model;
  { fsdp2::MetaDeviceGuard meta; model = std::make_shared<ManyImpl>(rows); }
  for (Linear& layer : model->layers) fsdp2::fully_shard(layer);
  fsdp2::fully_shard(model);
  EXPECT_LE(extra_mib([&] {
              fsdp2::to_empty(model, torch::kCPU);
              torch::manual_seed(1);
              fsdp2::reset_parameters(model);
            }),
            largest_mib + kSlack);
  EXPECT_LE(extra_mib([&] {
              torch::NoGradGuard no_grad;
              for (const Tensor& param : model->parameters()) fsdp2::DTensor(param).full_tensor();
            }),
            2 * largest_mib + kSlack);  // the result, and Gloo's own copy of it
}

RANKS_TEST(Init, MemoryIsBoundedByTheLargestTensorAmongSmallOnes, 2) {
  expect_bounded({256, 256, 16384, 256, 256, 256}, 64);
}
RANKS_TEST(Init, MemoryIsBoundedByOneOfManyEqualLayers, 2) {
  expect_bounded(std::vector<int64_t>(32, 1024), 4);
}

}  // namespace
