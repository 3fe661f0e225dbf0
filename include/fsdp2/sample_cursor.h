#pragma once

// Which samples of a data set a rank reads next, for any number of ranks.

#include <cstdint>
#include <optional>
#include <vector>

#include <fsdp2/dcp/value.h>
#include <fsdp2/export.h>

namespace fsdp2 {

struct SampleCursorOptions {
  int64_t size = 0;          ///< samples of the data set, 1 or more
  int64_t global_batch = 0;  ///< samples that all ranks together read at a step, 1 or more
  bool shuffle = true;       ///< every epoch in another order
  int64_t seed = 0;          ///< of the orders
  /// Leave out the samples at the end of an epoch that do not fill a global batch (others in every epoch, if shuffled).
  /// false: the last step of an epoch is shorter, and ranks may get fewer samples than others, or none.
  bool drop_last = true;
  /// Which part of every global batch is read here; default: this process of all. Where ranks share their samples
  /// (tensor parallelism), those of the data-parallel group.
  std::optional<int> rank = {}, world_size = {};
};

/// A position in an endless walk through the data set, epoch after epoch. The global batch of a step is the same on
/// any number of ranks; the ranks read its parts, in order. So a run that is resumed on another number of ranks goes
/// on with exactly the samples that come next: within an epoch none is repeated and none is left out.
///
///     auto cursor = std::make_shared<fsdp2::SampleCursor>(
///         fsdp2::SampleCursorOptions{.size = 1281167, .global_batch = 256});
///     for (int64_t index : cursor->next()) ...
///
/// The order of an epoch is a formula of (seed, epoch, position), not a stored permutation: no memory, and going to any
/// position takes no time. Stands in a checkpoint as a dcp::Stateful whose state is the same on all ranks (it needs no
/// per_rank()). Not collective.
class FSDP2_API SampleCursor : public dcp::Stateful {
 public:
  /// kInvalidArgument for an option outside its range; drop_last with fewer samples than one global batch.
  explicit SampleCursor(const SampleCursorOptions& options);

  /// Indices into the data set: this rank's part of the next global batch. Starts the next epoch by itself.
  std::vector<int64_t> next();
  /// The same without moving on.
  std::vector<int64_t> peek() const;

  /// Epoch and position of what was read last; before the first read and after set_position(), of what comes next.
  int64_t epoch() const { return epoch_; }
  /// Samples of the epoch that all ranks together have read.
  int64_t position() const { return position_; }
  /// True when the next read starts an epoch.
  bool at_epoch_start() const;
  int64_t steps_per_epoch() const;
  /// kInvalidArgument: a negative epoch, a position outside [0, size].
  void set_position(int64_t epoch, int64_t position);

  /// "epoch", "position", "seed", "size", "shuffle".
  dcp::StateDict state_dict() override;
  /// Takes over epoch, position and seed; the global batch and the number of ranks may be others than those that saved.
  /// kNotFound naming a missing key; kInvalidArgument: another size or shuffle, as the position means nothing then;
  /// values outside their range. Nothing is changed then.
  void load_state_dict(const dcp::StateDict& state) override;

 private:
  struct Range {
    int64_t epoch, begin, end;  // positions of a global batch
  };
  Range next_range() const;
  std::vector<int64_t> samples(const Range& range) const;

  SampleCursorOptions options_;
  int rank_, world_size_;
  int64_t epoch_ = 0, position_ = 0;
};

}  // namespace fsdp2
