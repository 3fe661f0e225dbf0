// labels: ranks
// backends: gloo, shm
// Clipping parameters on several meshes at once.

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

/// A router over all ranks, experts over the two ranks of this rank's row.
struct MoeImpl : torch::nn::Module {
  MoeImpl() {
    router = register_module("router", torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
    expert = register_module("expert", torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
    torch::NoGradGuard no_grad;
    router->weight.fill_(1);
    expert->weight.fill_(1);
  }
  Tensor forward(const Tensor& x) { return expert(router(x)); }
  torch::nn::Linear router{nullptr}, expert{nullptr};
};

std::shared_ptr<MoeImpl> sharded_moe() {
  auto moe = std::make_shared<MoeImpl>();
  const auto grid = fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"ep", "efsdp"});
  fsdp2::fully_shard(moe, {.shard_placement_fn = [&](const std::string& fqn, const Tensor&) {
    return fqn.rfind("expert", 0) == 0 ? std::optional(fsdp2::ShardPlacement{{0}, grid["efsdp"]}) : std::nullopt;
  }});
  return moe;
}

void set_gradient(const Tensor& param, double value) {
  param.mutable_grad() = fsdp2::DTensor(param.detach().clone()).tensor();
  param.mutable_grad().fill_(value);
}

RANKS_TEST(ClipMeshes, TheSameExpertsEverywhereGiveOneTotal, 4) {
  auto moe = sharded_moe();
  set_gradient(moe->router->weight, 3);
  set_gradient(moe->expert->weight, 4);
  // 16 elements of 3 and 16 of 4: the root of 16 * 9 + 16 * 16.
  EXPECT_NEAR(fsdp2::clip_grad_norm_(moe->parameters(), 10).item<double>(), 20, 1e-5);
  EXPECT_LE(max_difference(whole(moe->router->weight.grad()), torch::full({4, 4}, 1.5)), 1e-5);
}

RANKS_TEST(ClipMeshes, ExpertsOfTheirOwnInEachPlaceAreClippedApart, 4) {
  auto moe = sharded_moe();
  set_gradient(moe->router->weight, 3);
  set_gradient(moe->expert->weight, rank < 2 ? 4 : 5);
  EXPECT_FSDP2_ERROR(fsdp2::clip_grad_norm_(moe->parameters(), 10), kUsage, "parameters of each mesh by itself");
  EXPECT_LE(max_difference(whole(moe->router->weight.grad()), torch::full({4, 4}, 3.0)), 0);
  EXPECT_NEAR(fsdp2::clip_grad_norm_({moe->router->weight}, 6).item<double>(), 12, 1e-5);
  EXPECT_NEAR(fsdp2::clip_grad_norm_({moe->expert->weight}, 6).item<double>(), rank < 2 ? 16 : 20, 1e-5);
}

}  // namespace
