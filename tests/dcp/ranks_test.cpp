// labels: ranks
// Saving and loading on several ranks: layouts, who writes what, errors that reach every rank.

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>
#include <fsdp2/tensor/dtensor.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>

#include "dcp/same.h"
#include "dcp/sample_state.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;

// The folder has to be known before the ranks are forked.
TEST(DcpRanks, EveryRankWritesItsFileAndReplicasOnce) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(3, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {3});
    dcp::StateDict state;
    for (int i = 0; i < 3; ++i) state["replica" + std::to_string(i)] = torch::full({64, 64}, static_cast<float>(i));
    state["sharded"] = distribute_tensor(torch::arange(9, torch::kFloat), mesh, {Shard{0}}).tensor();
    dcp::save(state, folder.path() + "/ckpt");
    // 16 KiB each: spread over the ranks, none twice.
    const auto bytes = fs::file_size(folder.path() + "/ckpt/__" + std::to_string(rank) + "_0.distcp");
    EXPECT_GT(bytes, 16384u);
    EXPECT_LT(bytes, 2 * 16384u);
  }));
}

TEST(DcpRanks, EveryLayoutIntoEveryOther) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(4, [&](int) {
    const DeviceMesh line = init_device_mesh(c10::kCPU, {4}), square = init_device_mesh(c10::kCPU, {2, 2});
    const torch::Tensor full = rule_values({7, 5}, at::kFloat, 3);
    const auto layouts = [&](const torch::Tensor& values) {
      dcp::StateDict state;
      state["plain"] = values.clone();
      state["rows"] = distribute_tensor(values, line, {Shard{0}}).tensor();
      state["columns"] = distribute_tensor(values, line, {Shard{1}}).tensor();
      state["replica"] = distribute_tensor(values, line, {Replicate{}}).tensor();
      state["hybrid"] = distribute_tensor(values, square, {Replicate{}, Shard{0}}).tensor();
      state["blocks"] = distribute_tensor(values, square, {Shard{1}, Shard{0}}).tensor();
      state["twice"] = distribute_tensor(values, square, {Shard{0}, Shard{0}}).tensor();
      return state;
    };
    const dcp::StateDict expected = layouts(full);
    dcp::save(expected, folder.path() + "/ckpt");
    for (const auto& [from, value] : expected) {
      dcp::save({{"x", value}}, folder.path() + "/" + from);
      for (const auto& [to, wanted] : expected) {
        dcp::StateDict target{{"x", layouts(torch::zeros_like(full)).at(to)}};
        dcp::load(target, folder.path() + "/" + from);
        EXPECT_TRUE(same(target.at("x"), wanted, from + " into " + to));
      }
    }
  }));
}

TEST(DcpRanks, ErrorsOfOneRankReachAll) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(3, [&](int rank) {
    const std::string path = folder.path() + "/ckpt";
    EXPECT_FSDP2_ERROR(dcp::save({{"epoch", rank}}, path), kInvalidArgument, "epoch differs between ranks: rank 0");
    dcp::StateDict bad{{"x", torch::ones({2})}};
    if (rank == 1) bad["x"] = torch::empty({2}, torch::kMeta);
    EXPECT_FSDP2_ERROR(dcp::save(bad, path), kInvalidArgument, "rank 1 failed");
    dcp::StateDict shape{{"x", torch::ones({rank == 2 ? 3 : 2})}};
    EXPECT_FSDP2_ERROR(dcp::save(shape, path), kInvalidArgument, "rank 2 has shape [3]");
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {3});
    const DTensor partial = from_local(torch::ones({2}), mesh, {Partial{}}, std::vector<int64_t>{2});
    EXPECT_FSDP2_ERROR(dcp::save({{"p", partial.tensor()}}, path), kInvalidArgument, "redistribute");
    EXPECT_TRUE(fs::is_empty(folder.path())) << "a staging folder is left";
    barrier();

    dcp::save({{"x", torch::ones({2})}}, path);
    EXPECT_FSDP2_ERROR(dcp::save({{"x", torch::ones({2})}}, path), kInvalidArgument, "rank 0 failed");
    dcp::StateDict target{{"x", torch::zeros({2})}};
    if (rank == 2) target["y"] = torch::zeros({2});
    EXPECT_FSDP2_ERROR(dcp::load(target, path), kNotFound, "rank 2 failed");
    EXPECT_TRUE(target.at("x").tensor().equal(torch::zeros({2}))) << "changed although the load failed";
  }));
}

TEST(DcpRanks, GroupOfSomeRanks) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(3, [&](int rank) {
    const ProcessGroup group = new_group({2, 0});
    const std::string path = folder.path() + "/ckpt";
    if (rank != 1) {
      dcp::save({{"x", torch::full({2}, 4.0f)}}, path, {.group = group});
      dcp::StateDict target{{"x", torch::zeros({2})}};
      dcp::load(target, path, {.group = group});
      EXPECT_TRUE(target.at("x").tensor().equal(torch::full({2}, 4.0f)));
    }
    barrier();
    EXPECT_TRUE(fs::exists(path + "/__1_0.distcp"));
    EXPECT_FALSE(fs::exists(path + "/__2_0.distcp"));
  }));
}

}  // namespace
}  // namespace fsdp2::testing
