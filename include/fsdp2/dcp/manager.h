#pragma once

// The checkpoints of a training run: one folder, one checkpoint per saved step, old ones removed, resumed from the
// newest that is whole.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/export.h>

namespace fsdp2::dcp {

struct CheckpointManagerOptions {
  /// Complete checkpoints that stay, newest first; 0 = all.
  int keep_last = 3;
  /// Those of steps that this number divides stay for good; 0 = none.
  int64_t keep_every = 0;
  /// Save in the background: save() returns when the state is copied, wait() ends it.
  bool async = false;
  /// A checkpoint is named by this and its step: step-00000100.
  std::string prefix = "step-";
  /// Group and storage are used for loading as well.
  SaveOptions save = {};
  LoadOptions load = {};
};

struct CheckpointInfo {
  int64_t step = 0;
  std::filesystem::path path;
};
struct SkippedCheckpoint {
  std::string name;    ///< in the manager's folder
  std::string reason;  ///< "no .metadata: ...", or what loading it said
};

struct LatestCheckpoint {
  std::optional<CheckpointInfo> checkpoint;  ///< none: there is no complete one
  std::vector<SkippedCheckpoint> skipped;    ///< incomplete ones, whatever their step
};
struct ResumeReport {
  std::optional<CheckpointInfo> checkpoint;  ///< none: nothing was loaded, the run starts at its beginning
  LoadReport load;
  std::vector<SkippedCheckpoint> skipped;  ///< incomplete ones, and newer ones that are damaged
};

/// Every rank of the group calls every method, in the same order. What there is and what happens to it is decided by
/// rank 0, so ranks whose views of the folder differ (network file systems) act alike. One job saves to a folder at a
/// time; others may read it.
///
///     fsdp2::dcp::CheckpointManager manager("runs/7", {.keep_last = 2, .async = true});
///     const auto resumed = manager.load_latest(state);
///     for (int64_t step = resumed.checkpoint ? resumed.checkpoint->step : 0; step < 10000;) {
///       train(); ++step;
///       if (step % 500 == 0) manager.save(step, state);
///     }
///     manager.wait();
class FSDP2_API CheckpointManager {
 public:
  /// Touches nothing. kInvalidArgument for an option outside its range.
  explicit CheckpointManager(std::filesystem::path folder, CheckpointManagerOptions options = {});

  /// Saves `state` as the checkpoint of a step; when it is complete, removes what need not be kept. Removed is what the
  /// options do not keep, other than the one just saved; a checkpoint disappears whole or not at all, and what cannot
  /// be removed stays, with a warning in the log. Before, clears away what earlier saves to this folder that died left
  /// behind; a folder of this step without `.metadata`, or whose damage load_latest() met, is replaced.
  /// With `async`, first does what wait() does.
  /// Errors: those of dcp::save(); kInvalidArgument: the step is negative, or differs between ranks.
  void save(int64_t step, const StateDict& state);
  /// Ends the save in the background, if there is one, and removes what need not be kept. Throws what that save threw.
  /// Call it before the program ends: a manager that is destroyed lets the save go on, but removes nothing.
  void wait();

  /// The complete ones, newest first; after wait(). Names may have any number of digits.
  std::vector<CheckpointInfo> all();
  /// The first of all(), and what was not looked at, which rank 0 also logs.
  LatestCheckpoint latest();

  /// Loads the newest checkpoint that can be loaded: one that is damaged (kCorruption, or a file is missing) is left
  /// out on all ranks, and the next older one is tried. A state that does not fit the checkpoint (missing keys, other
  /// sizes) is an error: an older one would not help. kCorruption: there are checkpoints, and all are damaged.
  ResumeReport load_latest(StateDict& state);

  /// Where save() puts the checkpoint of a step.
  std::filesystem::path path(int64_t step) const;

 private:
  struct Listing {
    std::vector<CheckpointInfo> complete;  // newest first
    std::vector<SkippedCheckpoint> skipped;
    std::vector<std::string> leftovers;  // of saves that died
  };
  std::optional<int64_t> step_of(const std::string& name) const;
  std::optional<int64_t> step_of_leftover(const std::string& name) const;
  Listing list() const;
  Listing agreed_list() const;
  void clear_leftovers() const;
  void prune(int64_t saved) const;

  std::filesystem::path folder_;
  CheckpointManagerOptions options_;
  std::set<std::filesystem::path> damaged_;  // what load_latest() could not load
  SaveFuture pending_;
  int64_t pending_step_ = 0;
};

}  // namespace fsdp2::dcp
