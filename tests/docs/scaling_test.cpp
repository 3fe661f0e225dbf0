// labels: ranks
// docs/scaling.md shows what scripts/scaling_model.py computes, and the bytes that it assumes are those that are sent.

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include <fsdp2/fsdp2.h>

#include "support/ranks.h"

namespace {

using fsdp2::testing::read_file;
using fsdp2::testing::run_python;
using fsdp2::testing::run_ranks;
using fsdp2::testing::TempDir;
using fsdp2::testing::test_file;

constexpr const char* kModel = "../scripts/scaling_model.py";

TEST(Scaling, ThePageShowsWhatTheModelComputes) {
  const auto result = run_python(kModel, {"--check", test_file("../docs/scaling.md")});
  EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST(Scaling, AnotherNumberOnThePageIsSeen) {
  std::string page = read_file(test_file("../docs/scaling.md"));
  const size_t cell = page.find("| 8 H100, compile | 6,667 |");
  ASSERT_NE(cell, std::string::npos);
  page.replace(cell, 27, "| 8 H100, compile | 6,668 |");
  const TempDir folder;
  std::ofstream(folder.path() + "/page.md") << page;
  const auto result = run_python(kModel, {"--check", folder.path() + "/page.md"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.output.find("table \"anchors\" differs"), std::string::npos) << result.output;
}

/// One step of a sharded block stack on the meta device: what forward computes does not matter for what is sent.
struct TouchImpl : torch::nn::Module {
  explicit TouchImpl(const std::vector<std::vector<int64_t>>& shapes) {
    for (const auto& shape : shapes) {
      weights.push_back(register_parameter("w" + std::to_string(weights.size()), torch::empty(shape)));
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor sum = x;
    for (const torch::Tensor& weight : weights) sum = sum + weight.view({-1})[0];
    return sum;
  }
  std::vector<torch::Tensor> weights;
};
FSDP2_MODULE(Touch);

struct ShapesOf8BImpl : torch::nn::Module {
  static constexpr int64_t kDim = 4096, kKv = 1024, kFfn = 14336, kVocab = 128256;
  ShapesOf8BImpl() {
    for (int layer = 0; layer < 32; ++layer) {
      blocks.push_back(
          register_module("layer" + std::to_string(layer), Touch(std::vector<std::vector<int64_t>>{{kDim, kDim},
                                                                                                   {kKv, kDim},
                                                                                                   {kKv, kDim},
                                                                                                   {kDim, kDim},
                                                                                                   {kFfn, kDim},
                                                                                                   {kDim, kFfn},
                                                                                                   {kFfn, kDim},
                                                                                                   {kDim},
                                                                                                   {kDim}})));
    }
    root = register_module("root", Touch(std::vector<std::vector<int64_t>>{{kVocab, kDim}, {kDim}, {kVocab, kDim}}));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (Touch& block : blocks) x = block(x);
    return root(x);
  }
  std::vector<Touch> blocks;
  Touch root{nullptr};
};
FSDP2_MODULE(ShapesOf8B);

void expect_bytes(int shards, int replicas) {
  const auto python = run_python(kModel, {"--bytes", std::to_string(shards), std::to_string(replicas)});
  ASSERT_EQ(python.exit_code, 0) << python.output;
  const auto expected = nlohmann::json::parse(python.output);
  ASSERT_TRUE(
      run_ranks(1,
                [&](int) {
                  ::setenv("FSDP2_DEBUG", "0", 1);
                  fsdp2::init_process_group({.backend = "fake", .rank = 3, .world_size = shards * replicas});
                  const auto mesh = fsdp2::init_device_mesh(torch::kCPU, {replicas, shards}, {"replicate", "shard"});
                  ShapesOf8B model = nullptr;
                  {
                    const fsdp2::MetaDeviceGuard meta;
                    model = ShapesOf8B();
                  }
                  const fsdp2::FullyShardOptions options{
                      .mesh = replicas > 1 ? mesh : mesh["shard"],
                      .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}};
                  for (const Touch& block : model->blocks) fsdp2::fully_shard(block, options);
                  fsdp2::fully_shard(model, options);
                  EXPECT_EQ(fsdp2::num_parameters(model), 8030261248);
                  model(torch::empty({1}, torch::kMeta)).sum().backward();
                  nlohmann::json counted;
                  for (const char* axis : {"shard", "replicate"}) {
                    for (const auto& [operation, count] : fsdp2::fake_counts(mesh.get_group(axis))) {
                      if (count.calls > 0) counted[operation] = {{"calls", count.calls}, {"bytes", count.bytes}};
                    }
                  }
                  EXPECT_EQ(counted, expected);
                },
                {.init_process_group = false}));
}

TEST(Scaling, TheLibrarySendsTheBytesOfTheModel) {
  expect_bytes(8, 1);
  expect_bytes(1024, 1);
  expect_bytes(4096, 1);
  expect_bytes(8, 128);
}

}  // namespace
