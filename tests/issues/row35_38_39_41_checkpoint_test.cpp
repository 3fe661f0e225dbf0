// labels: ranks
// Checkpoints that hold something else than what was saved: values from after the call of async_save (pytorch#144657),
// a flipped bit that nobody notices (torchtitan#4011), files of an earlier save with more ranks (pytorch#191398),
// replicated tensors spread over hosts that do not share a disk (pytorch#125740).

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <set>

#include "dcp/hooked_storage.h"
#include "dcp/same.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;
using dcp::StateDict;

std::set<std::string> files_of(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

void flip(const fs::path& file, size_t at) {
  std::string content = read_file(file);
  content.at(at) = static_cast<char>(content.at(at) ^ 1);
  std::ofstream(file, std::ios::binary) << content;
}

TEST(Row35, ASaveInTheBackgroundHoldsTheValuesOfItsCall) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {2});
    const auto state = [&](float value) {
      const torch::Tensor sharded = distribute_tensor(torch::full({5, 3}, value), mesh, {Shard{0}}).tensor();
      return StateDict{{"x", torch::full({1000}, value)}, {"sharded", sharded}, {"step", value}};
    };
    const auto overwrite = [](StateDict& changed, float value) {
      changed["x"].tensor().fill_(value);
      DTensor(changed["sharded"].tensor()).to_local().fill_(value);
      changed["step"] = value;
    };
    for (int step = 1; step <= 5; ++step) {
      StateDict live = state(static_cast<float>(step));
      const std::string path = folder.path() + "/" + std::to_string(step);
      const dcp::SaveFuture future = dcp::async_save(live, path);
      overwrite(live, -7);
      if (step % 2 == 0) future.wait();
      dcp::load(live, path);  // waits for the save
      EXPECT_TRUE(same(live, state(static_cast<float>(step)))) << "rank " << rank << ", step " << step;
    }
    // Two in a row: the second waits for the first, whose buffers it uses again.
    StateDict live = state(8);
    const dcp::SaveFuture first = dcp::async_save(live, folder.path() + "/8");
    overwrite(live, 9);
    const dcp::SaveFuture second = dcp::async_save(live, folder.path() + "/9");
    EXPECT_TRUE(first.ready());
    overwrite(live, -7);
    second.wait();
    for (const int step : {8, 9}) {
      dcp::load(live, folder.path() + "/" + std::to_string(step));
      EXPECT_TRUE(same(live, state(static_cast<float>(step)))) << step;
    }
  }));
}

TEST(Row38, AFlippedBitIsAnErrorThatNamesFileAndKey) {
  const TempDir folder;
  const fs::path path = folder.path() + "/ckpt", file = path / "__0_0.distcp";
  dcp::save({{"w", torch::ones({4096, 8})}}, path);
  flip(file, fs::file_size(file) / 2);
  flip(file, fs::file_size(file) / 2 + 1000);
  StateDict loaded{{"w", torch::zeros({4096, 8})}};
  EXPECT_FSDP2_ERROR(dcp::load(loaded, path), kCorruption, "__0_0.distcp");
  EXPECT_FSDP2_ERROR(dcp::Reader(path).read("w"), kCorruption, "w");
  const dcp::VerifyReport report = dcp::verify(path);
  EXPECT_TRUE(report.has_checksums);
  ASSERT_EQ(report.faults.size(), 1u);
  EXPECT_EQ(report.faults[0].file, "__0_0.distcp");
  EXPECT_EQ(report.faults[0].key, "w");
  dcp::load(loaded, path, {.verify_checksums = false});
  EXPECT_EQ(loaded["w"].tensor().ne(1).sum().item<int64_t>(), 2);
}

TEST(Row39, OverwritingLeavesNothingOfASaveWithMoreRanks) {
  const TempDir folder;
  const fs::path path = folder.path() + "/ckpt";
  const auto state = [](float value) {
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {get_world_size()});
    return StateDict{{"w", distribute_tensor(torch::full({4, 2}, value), mesh, {Shard{0}}).tensor()}};
  };
  ASSERT_TRUE(run_ranks(2, [&](int) { dcp::save(state(1), path); }));
  EXPECT_EQ(files_of(path), (std::set<std::string>{".metadata", ".checksums", "__0_0.distcp", "__1_0.distcp"}));
  ASSERT_TRUE(run_ranks(1, [&](int) {
    EXPECT_FSDP2_ERROR(dcp::save(state(2), path), kInvalidArgument, "overwrite = true");
    dcp::save(state(2), path, {.overwrite = true});
    EXPECT_EQ(files_of(path), (std::set<std::string>{".metadata", ".checksums", "__0_0.distcp"}));
    EXPECT_EQ(files_of(folder.path()), std::set<std::string>{"ckpt"});
    StateDict loaded = state(0);
    dcp::load(loaded, path);
    EXPECT_TRUE(same(loaded, state(2)));
    // As Python leaves it: the file of a rank that is no more.
    std::ofstream(path / "__1_0.distcp") << "stale";
    const dcp::VerifyReport report = dcp::verify(path);
    EXPECT_TRUE(report.ok());
    EXPECT_EQ(report.unreferenced, std::vector<std::string>{"__1_0.distcp"});
  }));
}

/// Names of the files with the items of a checkpoint.
std::set<std::string> written(const fs::path& path) {
  std::set<std::string> names;
  for (const std::string& name : files_of(path)) {
    if (name.ends_with(".distcp") && fs::file_size(path / name) > 0) names.insert(name);
  }
  return names;
}

TEST(Row41, ReplicasAreWrittenByTheLowestRankOrSpreadAndReadFromWhereTheyLie) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    const DeviceMesh replicated = init_device_mesh(c10::kCPU, {2, 1}, {"replicate", "shard"});
    const auto state = [&](float value) {
      StateDict result;
      for (const char* name : {"a", "b", "c", "d"}) {
        const torch::Tensor whole = torch::full({6, 4}, value);
        result[name] = distribute_tensor(whole, replicated, {Replicate{}, Shard{0}}).tensor();
      }
      return result;
    };
    const std::string lowest = folder.path() + "/lowest", spread = folder.path() + "/spread";
    dcp::save(state(1), lowest, {.replicas = dcp::Replicas::LowestRank});
    dcp::save(state(2), spread);
    EXPECT_EQ(written(lowest), std::set<std::string>{"__0_0.distcp"});
    EXPECT_EQ(written(spread), (std::set<std::string>{"__0_0.distcp", "__1_0.distcp"}));
    for (const auto& [path, value] : {std::pair{lowest, 1.0f}, {spread, 2.0f}}) {
      StateDict loaded = state(0);
      dcp::load(loaded, path);
      EXPECT_TRUE(same(loaded, state(value)));
    }
    barrier();

    // Shards: each rank opens the file with its own, and no other.
    const DeviceMesh sharded = init_device_mesh(c10::kCPU, {2});
    const auto shards = [&](float value) {
      return StateDict{{"w", distribute_tensor(torch::full({6, 4}, value), sharded, {Shard{0}}).tensor()}};
    };
    const std::string path = folder.path() + "/sharded";
    dcp::save(shards(3), path);
    std::set<std::string> opened;
    StateDict loaded = shards(0);
    dcp::LoadOptions options;
    options.storage = std::make_shared<HookedStorage>([&](const std::string& operation, const std::string& name) {
      if (operation == "open" && name.ends_with(".distcp")) opened.insert(fs::path(name).filename().string());
    });
    dcp::load(loaded, path, options);
    EXPECT_TRUE(same(loaded, shards(3)));
    EXPECT_EQ(opened, std::set<std::string>{"__" + std::to_string(rank) + "_0.distcp"});
  }));
}

TEST(Row41, AFolderThatTheRanksDoNotShareIsSaid) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    // The same path leads elsewhere on each rank, as on two hosts with disks of their own.
    const auto storage = dcp::make_memory_storage();
    const StateDict state{{"w", torch::full({2}, 1.0f)}, {"mine", dcp::per_rank(rank)}};
    EXPECT_FSDP2_ERROR(dcp::save(state, "ckpt", {.storage = storage}), kIo, "all ranks share");
    EXPECT_TRUE(storage->list("ckpt").empty());
  }));
}

}  // namespace
}  // namespace fsdp2::testing
