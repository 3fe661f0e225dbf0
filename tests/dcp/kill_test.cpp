// labels: ranks, slow
// timeout: 600
// SIGKILL of either rank before and after every operation of a save on the storage, and at random times, into a new and
// over an existing checkpoint: the newest complete checkpoint loads bit by bit, what was left behind is skipped by
// name and cleared by the next save.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <random>
#include <thread>

#include "dcp/hooked_storage.h"
#include "dcp/same.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;
using dcp::CheckpointManager;
using dcp::StateDict;

// More than one write buffer for either rank.
StateDict state_of(float value, const std::optional<DeviceMesh>& mesh = {}) {
  StateDict state{{"step", static_cast<int64_t>(value)}, {"small", torch::full({3}, value)}};
  for (const char* name : {"a", "b"}) {
    const torch::Tensor whole = torch::arange(700'001, torch::kFloat) * value;
    state[name] = mesh ? distribute_tensor(whole, *mesh, {Shard{0}}).tensor() : whole;
  }
  return state;
}

/// Folders of one trial: checkpoints of step 1, and of step 2 where that is replaced.
void prepare(const fs::path& run, bool existing) {
  dcp::save(state_of(1), run / "step-00000001");
  if (existing) dcp::save(state_of(2), run / "step-00000002");
}

/// Saves step 2 with other values on two ranks; `victim` has `storage`. True where the other rank lived and said what
/// happened, and the victim was killed.
struct Outcome {
  bool killed, survivor_ended;
  std::string text;
};
Outcome save_and_kill(const fs::path& run, int victim, bool existing,
                      const std::function<std::shared_ptr<dcp::Storage>()>& start) {
  const ::testing::AssertionResult result = run_ranks(2, [&](int rank) {
    const StateDict state = state_of(20, init_device_mesh(c10::kCPU, {2}));
    dcp::CheckpointManagerOptions options{.keep_last = 0, .save = {.overwrite = existing}};
    if (rank == victim) options.save.storage = start();
    CheckpointManager manager(run, options);
    try {
      manager.save(2, state);
    } catch (const Error& error) {
      std::cout << "said: " << error.what() << std::endl;
    }
  });
  Outcome outcome{false, true, result.message()};
  if (result) return outcome;
  const std::string dead = "[rank " + std::to_string(victim) + "] ended by Killed";
  const std::string other = "[rank " + std::to_string(1 - victim) + "] passed";
  outcome.killed = outcome.text.find(dead) != std::string::npos;
  outcome.survivor_ended = outcome.text.find(other) != std::string::npos;
  return outcome;
}

/// In one process: the newest complete checkpoint is whole, and the next save clears the rest away.
void expect_whole(const fs::path& run, bool existing, const std::string& where) {
  CheckpointManager manager(run, {.keep_last = 0});
  StateDict loaded = state_of(0);
  const dcp::ResumeReport resumed = manager.load_latest(loaded);
  ASSERT_TRUE(resumed.checkpoint) << where;
  const bool old = !existing && resumed.checkpoint->step == 1;
  if (old) {
    EXPECT_TRUE(same(loaded, state_of(1))) << where;
  } else {
    ASSERT_EQ(resumed.checkpoint->step, 2) << where;
    EXPECT_TRUE(same(loaded, state_of(20)) || (existing && same(loaded, state_of(2)))) << where;
  }
  for (const auto& skipped : resumed.skipped) {
    EXPECT_NE(skipped.name.find("step-00000002"), std::string::npos) << where;
    EXPECT_FALSE(skipped.reason.empty());
  }
  manager.save(3, state_of(3));
  EXPECT_TRUE(manager.latest().skipped.empty()) << where;
  EXPECT_EQ(std::distance(fs::directory_iterator(run), fs::directory_iterator()), old ? 2 : 3)
      << where << ": something was left in the folder";
}

struct Trial {
  fs::path run;
  bool existing;
  std::string where;
};

void expect_all_whole(const std::vector<Trial>& trials) {
  ASSERT_TRUE(run_ranks(1,
                        [&](int) {
                          set_log_sink([](LogLevel, const std::string&) {});
                          for (const Trial& trial : trials) expect_whole(trial.run, trial.existing, trial.where);
                        },
                        {.init_process_group = false}));
}

TEST(Kill, BeforeAndAfterEveryOperationOfASave) {
  const TempDir folder;
  std::vector<Trial> trials;
  size_t killed = 0;
  for (const bool existing : {false, true}) {
    const fs::path model = folder.path() + (existing ? "/existing" : "/new");
    ASSERT_TRUE(run_ranks(1, [&](int) { prepare(model, existing); }, {.init_process_group = false}));
    for (const int victim : {0, 1}) {
      for (int point = 1;; ++point) {
        const std::string where =
            model.filename().string() + ", rank " + std::to_string(victim) + ", operation " + std::to_string(point);
        const fs::path run = folder.path() + "/" + where;
        fs::copy(model, run, fs::copy_options::recursive);
        const Outcome outcome = save_and_kill(run, victim, existing, [&] {
          auto count = std::make_shared<std::atomic<int>>(0);
          return std::make_shared<HookedStorage>([count, point](const std::string& operation, const std::string&) {
            if (operation != "list" && ++*count == point) ::raise(SIGKILL);
          });
        });
        ASSERT_TRUE(outcome.survivor_ended) << where << "\n" << outcome.text;
        trials.push_back({run, existing, where});
        if (!outcome.killed) break;  // the save has fewer operations
        ++killed;
      }
    }
  }
  std::cout << killed << " saves were killed" << std::endl;
  EXPECT_GE(killed, 40u);
  expect_all_whole(trials);
}

TEST(Kill, AtRandomTimes) {
  const TempDir folder;
  std::vector<Trial> trials;
  std::mt19937 random(31);
  size_t killed = 0;
  for (const bool existing : {false, true}) {
    const fs::path model = folder.path() + (existing ? "/existing" : "/new");
    ASSERT_TRUE(run_ranks(1, [&](int) { prepare(model, existing); }, {.init_process_group = false}));
    for (int i = 0; i < 12; ++i) {
      const int victim = i % 2;
      // The later half of a save is where files are finished and names change.
      const auto delay = std::chrono::microseconds(std::uniform_int_distribution<int>(0, 40'000)(random));
      const std::string where = model.filename().string() + ", rank " + std::to_string(victim) + ", after " +
                                std::to_string(delay.count()) + " us, " + std::to_string(i);
      const fs::path run = folder.path() + "/" + where;
      fs::copy(model, run, fs::copy_options::recursive);
      const Outcome outcome = save_and_kill(run, victim, existing, [&] {
        std::thread([delay] {
          std::this_thread::sleep_for(delay);
          ::kill(::getpid(), SIGKILL);
        }).detach();
        return dcp::local_storage();
      });
      ASSERT_TRUE(outcome.survivor_ended) << where << "\n" << outcome.text;
      killed += outcome.killed;
      trials.push_back({run, existing, where});
    }
  }
  std::cout << killed << " of " << trials.size() << " saves were killed" << std::endl;
  EXPECT_GE(killed, 5u);
  expect_all_whole(trials);
}

}  // namespace
}  // namespace fsdp2::testing
