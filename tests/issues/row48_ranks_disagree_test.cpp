// labels: ranks
// accelerate#4105, pytorch!147758 and their likes: on a network file system a rank does not see yet what another one
// made, takes another branch, and all wait for ever. Also: writers that seek do not work on a pipe or an object store.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <filesystem>

#include "dcp/hooked_storage.h"
#include "dcp/same.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

using dcp::StateDict;

/// Data files as others see them, folders and metadata with the eyes of a rank to which nothing is there.
class Blind final : public dcp::Storage {
 public:
  std::string begin(const std::filesystem::path& target, bool overwrite) override {
    return inner_->begin(target, overwrite);
  }
  bool sees(const std::string& place) override { return inner_->sees(place); }
  std::unique_ptr<dcp::OutputFile> create(const std::string& place, const std::string& name) override {
    return inner_->create(place, name);
  }
  void commit(const std::string& place, const std::filesystem::path& target, bool overwrite) override {
    inner_->commit(place, target, overwrite);
  }
  void clean(const std::string& place, int rank, int world_size) noexcept override {
    inner_->clean(place, rank, world_size);
  }
  void discard(const std::string& place) noexcept override { inner_->discard(place); }
  std::shared_ptr<const dcp::InputFile> open(const std::filesystem::path& folder, const std::string& name) override {
    FSDP2_CHECK(name != ".metadata" && name != ".checksums", kNotFound, "there is no ", name, " yet");
    return inner_->open(folder, name);
  }
  std::vector<std::string> list(const std::filesystem::path&) override { return {}; }
  void remove(const std::filesystem::path&) override { ADD_FAILURE() << "only rank 0 removes"; }

 private:
  std::shared_ptr<dcp::Storage> inner_ = dcp::local_storage();
};

TEST(Row48, RanksThatSeeDifferentFoldersActAsRankZero) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(3, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {3});
    const auto state = [&](float value) {
      return StateDict{{"w", distribute_tensor(torch::full({7, 2}, value), mesh, {Shard{0}}).tensor()},
                       {"step", value}};
    };
    dcp::CheckpointManagerOptions options{.keep_last = 1};
    if (rank == 1) options.save.storage = std::make_shared<Blind>();
    dcp::CheckpointManager manager(folder.path() + "/run", options);
    manager.save(1, state(1));
    manager.save(2, state(2));
    EXPECT_EQ(manager.all().size(), 1u);
    EXPECT_EQ(manager.latest().checkpoint->step, 2);
    StateDict loaded = state(0);
    EXPECT_EQ(manager.load_latest(loaded).checkpoint->step, 2);
    EXPECT_TRUE(same(loaded, state(2)));
  }));
}

TEST(Row48, ARankThatCannotReadTakesAllToTheOlderOne) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(3, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {3});
    const auto state = [&](float value) {
      return StateDict{{"w", distribute_tensor(torch::full({7, 2}, value), mesh, {Shard{0}}).tensor()}};
    };
    dcp::CheckpointManagerOptions options;
    if (rank == 2) {
      options.save.storage = std::make_shared<HookedStorage>([](const std::string& operation, const std::string& name) {
        const bool newest = operation == "open" && name.find("step-00000002") != std::string::npos;
        FSDP2_CHECK(!newest || name.find(".distcp") == std::string::npos, kCorruption, name, " is damaged for rank 2");
      });
    }
    dcp::CheckpointManager manager(folder.path() + "/run", options);
    manager.save(1, state(1));
    manager.save(2, state(2));
    StateDict loaded = state(0);
    const dcp::ResumeReport resumed = manager.load_latest(loaded);
    ASSERT_TRUE(resumed.checkpoint);
    EXPECT_EQ(resumed.checkpoint->step, 1);
    ASSERT_EQ(resumed.skipped.size(), 1u);
    EXPECT_NE(resumed.skipped[0].reason.find("rank 2"), std::string::npos) << resumed.skipped[0].reason;
    EXPECT_TRUE(same(loaded, state(1)));
  }));
}

}  // namespace
}  // namespace fsdp2::testing
