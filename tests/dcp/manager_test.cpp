// labels: ranks
// The checkpoints of a run: which are kept, which are removed, what is skipped and said, and from where a run resumes.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "dcp/hooked_storage.h"
#include "dcp/same.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;
using dcp::CheckpointInfo;
using dcp::CheckpointManager;
using dcp::StateDict;

StateDict state_of(int64_t step) {
  return {{"weight", torch::full({4, 3}, static_cast<float>(step))}, {"step", step}, {"bias", torch::arange(5) + step}};
}

std::vector<int64_t> steps(const std::vector<CheckpointInfo>& checkpoints) {
  std::vector<int64_t> result;
  for (const CheckpointInfo& info : checkpoints) result.push_back(info.step);
  return result;
}
std::vector<std::string> names(const std::vector<dcp::SkippedCheckpoint>& skipped) {
  std::vector<std::string> result;
  for (const auto& each : skipped) result.push_back(each.name);
  return result;
}

/// Log lines while it lives.
class LogLines {
 public:
  LogLines() {
    set_log_sink([this](LogLevel, const std::string& text) { text_ += text + "\n"; });
  }
  ~LogLines() { set_log_sink({}); }
  bool contain(const std::string& part) const { return text_.find(part) != std::string::npos; }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

void flip_byte(const fs::path& file) {
  std::fstream stream(file, std::ios::binary | std::ios::in | std::ios::out);
  stream.seekg(0, std::ios::end);
  const auto middle = static_cast<std::streamoff>(stream.tellg()) / 2;
  stream.seekg(middle);
  const char byte = static_cast<char>(stream.get());
  stream.seekp(middle);
  stream.put(static_cast<char>(byte ^ 1));
}
fs::path data_file(const fs::path& checkpoint) {
  for (const auto& entry : fs::directory_iterator(checkpoint)) {
    if (entry.path().extension() == ".distcp") return entry.path();
  }
  return {};
}

TEST(CheckpointManager, KeepsTheLastAndEveryNthInAnyStorage) {
  const TempDir folder;
  for (const auto& storage : {dcp::make_memory_storage(), dcp::local_storage()}) {
    CheckpointManager manager(folder.path() + "/run", {.keep_last = 2, .keep_every = 40, .save = {.storage = storage}});
    EXPECT_TRUE(manager.all().empty());
    StateDict nothing = state_of(0);
    EXPECT_FALSE(manager.load_latest(nothing).checkpoint);
    for (int64_t step = 10; step <= 90; step += 10) manager.save(step, state_of(step));
    EXPECT_EQ(steps(manager.all()), (std::vector<int64_t>{90, 80, 40}));
    EXPECT_EQ(manager.latest().checkpoint->path, manager.path(90));
    EXPECT_EQ(manager.path(90).filename(), "step-00000090");
    StateDict loaded = state_of(0);
    const dcp::ResumeReport resumed = manager.load_latest(loaded);
    EXPECT_EQ(resumed.checkpoint->step, 90);
    EXPECT_EQ(resumed.load.loaded.size(), 3u);
    EXPECT_TRUE(resumed.skipped.empty());
    EXPECT_TRUE(same(loaded, state_of(90)));
  }
  CheckpointManager all(folder.path() + "/all", {.keep_last = 0});
  for (int64_t step = 0; step < 5; ++step) all.save(step, state_of(step));
  EXPECT_EQ(all.all().size(), 5u);
}

TEST(CheckpointManager, TheOneJustSavedStaysAlsoWhenItIsNotTheNewest) {
  CheckpointManager manager("run", {.keep_last = 1, .save = {.storage = dcp::make_memory_storage()}});
  manager.save(200, state_of(200));
  manager.save(150, state_of(150));
  EXPECT_EQ(steps(manager.all()), (std::vector<int64_t>{200, 150}));
  manager.save(160, state_of(160));
  EXPECT_EQ(steps(manager.all()), (std::vector<int64_t>{200, 160}));
}

TEST(CheckpointManager, NamesOfAnyLengthAreReadOthersLeftAlone) {
  const TempDir folder;
  const fs::path run = folder.path() + "/run";
  dcp::save(state_of(7), run / "step-7");
  dcp::save(state_of(12345678901), run / "step-12345678901");
  for (const char* other : {"step-", "step-x", "step-1x", "Step-5", "step-1234567890123456789", "best", ".hidden"})
    dcp::save(state_of(1), run / other);
  std::ofstream(run / "step-9") << "a file";
  CheckpointManager manager(run, {.keep_last = 1});
  EXPECT_EQ(steps(manager.all()), (std::vector<int64_t>{12345678901, 7}));
  manager.save(12345678902, state_of(1));
  EXPECT_EQ(steps(manager.all()), (std::vector<int64_t>{12345678902}));
  EXPECT_EQ(std::distance(fs::directory_iterator(run), fs::directory_iterator()), 9);
  CheckpointManager iterations(run, {.prefix = "iter_"});
  iterations.save(3, state_of(3));
  EXPECT_EQ(iterations.all()[0].path, run / "iter_00000003");
}

TEST(CheckpointManager, WhatIsIncompleteIsSkippedSaidAndClearedByTheNextSave) {
  const TempDir folder;
  const fs::path run = folder.path() + "/run";
  CheckpointManager manager(run);
  manager.save(1, state_of(1));
  for (const char* dead : {"step-00000002", ".step-00000003.staging-0123456789abcdef",
                           "..step-00000000.staging-0123456789abcdef.staging-1123456789abcdef"}) {
    fs::create_directories(run / dead);
    std::ofstream(run / dead / "__0_0.distcp") << "half";
  }
  fs::create_directories(run / ".other-3.staging-0123456789abcdef");
  StateDict loaded = state_of(0);
  {
    const LogLines log;
    const dcp::LatestCheckpoint latest = manager.latest();
    EXPECT_EQ(latest.checkpoint->step, 1);
    EXPECT_EQ(latest.skipped.size(), 3u);
    EXPECT_EQ(latest.skipped[0].name, "step-00000002");
    EXPECT_NE(latest.skipped[0].reason.find("no .metadata"), std::string::npos);
    EXPECT_TRUE(log.contain("step-00000002") && log.contain(".step-00000003.staging-")) << log.text();
    const dcp::ResumeReport resumed = manager.load_latest(loaded);
    EXPECT_EQ(resumed.checkpoint->step, 1);
    EXPECT_EQ(names(resumed.skipped), names(latest.skipped));
    EXPECT_TRUE(same(loaded, state_of(1)));
  }
  manager.save(2, state_of(2));  // in the place of the incomplete one
  EXPECT_EQ(steps(manager.all()), (std::vector<int64_t>{2, 1}));
  EXPECT_TRUE(manager.latest().skipped.empty());
  EXPECT_TRUE(fs::exists(run / ".other-3.staging-0123456789abcdef")) << "another manager's";
}

TEST(CheckpointManager, ACheckpointThatWasBeingReplacedWhereFoldersCannotSwapIsFound) {
  const TempDir folder;
  const fs::path run = folder.path() + "/run", aside = run / ".step-00000005.staging-0123456789abcdef-old";
  CheckpointManager manager(run);
  manager.save(4, state_of(4));
  dcp::save(state_of(5), aside);
  StateDict loaded = state_of(0);
  EXPECT_EQ(manager.load_latest(loaded).checkpoint->path, aside);
  EXPECT_TRUE(same(loaded, state_of(5)));
  manager.save(6, state_of(6));
  EXPECT_EQ(steps(manager.all()), (std::vector<int64_t>{6, 5, 4})) << "cleared although it is the only one of step 5";
  EXPECT_FSDP2_ERROR(manager.save(5, state_of(50)), kInvalidArgument, "overwrite");
  EXPECT_EQ(steps(manager.all()), (std::vector<int64_t>{6, 5, 4}));
  EXPECT_EQ(manager.all()[1].path, manager.path(5)) << "back under its name";
}

TEST(CheckpointManager, DamageIsSteppedOverAndAStateThatDoesNotFitIsNot) {
  const TempDir folder;
  const fs::path run = folder.path() + "/run";
  for (int64_t step = 1; step <= 4; ++step) CheckpointManager(run, {.keep_last = 0}).save(step, state_of(step));
  CheckpointManager manager(run, {.keep_last = 2});
  flip_byte(data_file(manager.path(4)));
  fs::remove(data_file(manager.path(3)));
  StateDict loaded = state_of(0);
  const LogLines log;
  const dcp::ResumeReport resumed = manager.load_latest(loaded);
  EXPECT_EQ(resumed.checkpoint->step, 2);
  EXPECT_TRUE(same(loaded, state_of(2)));
  EXPECT_EQ(names(resumed.skipped), (std::vector<std::string>{"step-00000004", "step-00000003"}));
  for (const auto& skipped : resumed.skipped) {
    EXPECT_NE(skipped.reason.find(".distcp"), std::string::npos) << skipped.reason;
    EXPECT_TRUE(log.contain(skipped.name) && log.contain(skipped.reason)) << log.text();
  }
  // What is damaged is not counted, and is replaced when the run comes to its step.
  manager.save(3, state_of(30));
  EXPECT_EQ(steps(manager.all()), (std::vector<int64_t>{4, 3, 2}));
  EXPECT_FSDP2_ERROR(manager.save(3, state_of(31)), kInvalidArgument, "overwrite");
  manager.save(4, state_of(40));
  EXPECT_EQ(steps(manager.all()), (std::vector<int64_t>{4, 3}));
  EXPECT_EQ(manager.load_latest(loaded).checkpoint->step, 4);
  EXPECT_TRUE(same(loaded, state_of(40)));

  StateDict more = state_of(0);
  more["head"] = torch::zeros({2});
  EXPECT_FSDP2_ERROR(manager.load_latest(more), kNotFound, "head");
  StateDict other{{"weight", torch::zeros({3, 4})}};
  EXPECT_FSDP2_ERROR(manager.load_latest(other), kInvalidArgument, "[4, 3]");
  for (const CheckpointInfo& info : manager.all()) flip_byte(data_file(info.path));
  EXPECT_FSDP2_ERROR(manager.load_latest(loaded), kCorruption, "none of the 2 checkpoints");
}

TEST(CheckpointManager, AnOldOneThatCannotBeRemovedIsAWarning) {
  const TempDir folder;
  for (const bool own_error : {true, false}) {
    const auto storage = std::make_shared<HookedStorage>([&](const std::string& operation, const std::string& name) {
      if (operation != "remove") return;
      FSDP2_CHECK(!own_error, kIo, "cannot remove ", name);
      throw std::runtime_error("cannot remove " + name);
    });
    const fs::path run = folder.path() + "/run" + std::to_string(own_error);
    CheckpointManager manager(run, {.keep_last = 1, .save = {.storage = storage}});
    manager.save(1, state_of(1));
    fs::create_directory(run / ".step-00000007.staging-0123456789abcdef");
    const LogLines log;
    manager.save(2, state_of(2));
    EXPECT_TRUE(log.contain("an old checkpoint stays: cannot remove")) << log.text();
    EXPECT_TRUE(log.contain("interrupted save left behind stays: cannot remove")) << log.text();
    EXPECT_EQ(manager.all().size(), 2u);
  }
}

TEST(CheckpointManager, WrongArgumentsAreNamed) {
  EXPECT_FSDP2_ERROR(CheckpointManager(""), kInvalidArgument, "empty");
  EXPECT_FSDP2_ERROR(CheckpointManager("x", {.keep_last = -1}), kInvalidArgument, "keep_last is -1");
  EXPECT_FSDP2_ERROR(CheckpointManager("x", {.prefix = ".a"}), kInvalidArgument, "'.a'");
  EXPECT_FSDP2_ERROR(CheckpointManager("x", {.prefix = "a/b"}), kInvalidArgument, "'a/b'");
  CheckpointManager manager("x", {.save = {.storage = dcp::make_memory_storage()}});
  EXPECT_FSDP2_ERROR(manager.save(-1, state_of(1)), kInvalidArgument, "step -1");
}

// Shards on two ranks, saved in the background: removed is only after the next one is complete.
RANKS_TEST(CheckpointManager, SavesInTheBackgroundOnSeveralRanks, 2) {
  const std::string folder =
      all_gather_strings(rank == 0 ? TempDir().path() : "")[0];  // removed at once, then made again
  CheckpointManager manager(folder, {.keep_last = 1, .async = true});
  const DeviceMesh mesh = init_device_mesh(c10::kCPU, {2});
  const auto sharded = [&](float value) {
    return StateDict{{"w", distribute_tensor(torch::full({5, 2}, value), mesh, {Shard{0}}).tensor()}};
  };
  for (int64_t step = 1; step <= 3; ++step) {
    const StateDict state = sharded(static_cast<float>(step));
    manager.save(step, state);
    DTensor(state.at("w").tensor()).to_local().fill_(-1);  // after the call: not what is saved
  }
  manager.wait();
  EXPECT_EQ(steps(manager.all()), std::vector<int64_t>{3});
  EXPECT_FSDP2_ERROR(manager.save(4 + rank, sharded(0)), kInvalidArgument, "rank 1 saves step 5");
  StateDict loaded = sharded(0);
  EXPECT_EQ(manager.load_latest(loaded).checkpoint->step, 3);
  EXPECT_TRUE(same(loaded, sharded(3)));
  manager.save(3, sharded(5));  // refused in the background: said by whatever comes next
  EXPECT_FSDP2_ERROR(manager.wait(), kInvalidArgument, "overwrite");
  manager.wait();
  EXPECT_TRUE(same(loaded, sharded(3)));
  barrier();
  if (rank == 0) fs::remove_all(folder);
}

/// Fails on rank 1 alone, with an exception of its own.
struct FailsOnRank1 final : dcp::Stateful {
  StateDict state_dict() override { return {{"epoch", 1}}; }
  void load_state_dict(const StateDict&) override {
    if (get_rank() == 1) throw std::runtime_error("the cursor is stuck");
  }
};

RANKS_TEST(CheckpointManager, WhatOneRankAloneThrowsEndsTheOthersToo, 2) {
  const std::string folder = all_gather_strings(rank == 0 ? TempDir().path() : "")[0];
  CheckpointManager manager(folder);
  EXPECT_FSDP2_ERROR(manager.save(rank == 1 ? -1 : 1, state_of(1)), kInvalidArgument, "step -1");
  StateDict state = state_of(1);
  state["cursor"] = std::make_shared<FailsOnRank1>();
  manager.save(1, state);
  std::string said;
  try {
    manager.load_latest(state);
  } catch (const std::exception& error) {
    said = error.what();
  }
  EXPECT_NE(said.find("the cursor is stuck"), std::string::npos) << said;
  barrier();
  if (rank == 0) fs::remove_all(folder);
}

}  // namespace
}  // namespace fsdp2::testing
