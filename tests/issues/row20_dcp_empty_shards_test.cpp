// labels: ranks
// A weight of one row on 2 and 3 ranks leaves ranks without data; saving and loading must not care.

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/tensor/dtensor.h>
#include <torch/torch.h>

#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

TEST(Row20, EmptyShardsAreSavedAndLoadedOnAnyNumberOfRanks) {
  const TempDir folder;
  const auto path = [&](int world) { return folder.path() + "/ckpt" + std::to_string(world); };
  for (int world : {2, 3}) {
    ASSERT_TRUE(run_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh(c10::kCPU, {world});
      dcp::StateDict state;
      state["weight"] = distribute_tensor(torch::arange(8, torch::kFloat).reshape({1, 8}), mesh, {Shard{0}}).tensor();
      dcp::save(state, path(world));
    }));
  }
  for (int world : {1, 2, 3}) {
    ASSERT_TRUE(run_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh(c10::kCPU, {world});
      for (int saved : {2, 3}) {
        dcp::StateDict state;
        state["weight"] = distribute_tensor(torch::zeros({1, 8}), mesh, {Shard{0}}).tensor();
        const dcp::LoadReport report = dcp::load(state, path(saved));
        EXPECT_EQ(report.loaded, std::vector<std::string>{"weight"});
        const torch::Tensor full = DTensor(state["weight"].tensor()).full_tensor();
        EXPECT_TRUE(full.equal(torch::arange(8, torch::kFloat).reshape({1, 8})));
      }
    }));
  }
}

}  // namespace
}  // namespace fsdp2::testing
