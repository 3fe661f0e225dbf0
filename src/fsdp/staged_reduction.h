#pragma once

// Reduce-scatter from gradients where they lie. Note [Reductions through a ring] in the .cpp.

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/shm/shm_backend.h"

namespace fsdp2::detail {

class StagedReduction;

/// Memory of one process group through which gradients travel.
class StagingRing {
 public:
  /// Collective over the group.
  explicit StagingRing(shm::ShmBackend& backend);

 private:
  friend class StagedReduction;
  struct Header;
  std::byte* slot(int rank, uint64_t chunk) const;
  Header& header(int rank, uint64_t chunk) const;

  int ranks_, rank_;
  std::shared_ptr<shm::SharedMemory> memory_;
  std::shared_ptr<shm::Signals> written_, read_;  // chunks so far, per rank
  uint64_t reserved_ = 0, staged_ = 0;            // chunks of this rank
  bool broken_ = false;
  std::deque<StagedReduction*> unfinished_;  // oldest first
};

class StagedReduction {
 public:
  /// A whole gradient, contiguous, cut into equal chunks of `chunk` elements (the last ones may be short or empty).
  /// Undefined: zeros.
  struct Piece {
    at::Tensor gradient;
    int64_t chunk = 0;
  };
  /// All pieces have dtype `dtype`, no wider than that of `out`; other ranks' may have another. `out`: one rank's
  /// chunks one after the other, filled by finish() with the sum over ranks, in their order, over `divisor`. Ranks must
  /// agree on the fingerprint. `label` is for error texts. Stages what it can without waiting.
  StagedReduction(std::shared_ptr<StagingRing> ring, std::vector<Piece> pieces, at::ScalarType dtype, at::Tensor out,
                  double divisor, uint64_t fingerprint, std::string label);
  ~StagedReduction();
  StagedReduction(const StagedReduction&) = delete;
  StagedReduction& operator=(const StagedReduction&) = delete;

  /// Waits for the other ranks. False, on all ranks, where fingerprints differ; `out` has no values then.
  bool finish();

 private:
  void complete();
  void stage_next();
  void consume(uint64_t index);
  static constexpr unsigned kFewRanks = 8;
  using Inputs = c10::SmallVector<std::pair<int, const std::byte*>, kFewRanks>;  // of ranks
  void add_up(std::byte* out, const Inputs& inputs, int64_t count) const;
  bool ranks_agree();
  template <class Use>
  void for_spans(uint64_t index, Use&& use) const;
  int64_t numel_of(const Piece& piece, int rank) const;

  std::shared_ptr<StagingRing> ring_;
  std::vector<Piece> pieces_;
  at::ScalarType dtype_;
  std::vector<at::ScalarType> dtypes_;  // of the ranks, once known
  at::Tensor out_;
  double divisor_;
  uint64_t fingerprint_;
  std::string label_;
  uint64_t first_, count_, next_stage_;  // chunks: number of the first, how many, the next to stage
  int64_t per_chunk_;                    // elements
  bool past_cache_ = false;              // what it writes leaves the cache before it is read
  bool done_ = false, agreed_ = true;
};

/// The ring of a group whose CPU backend is shm, made at the first call (collective); null for other backends.
std::shared_ptr<StagingRing> staging_ring_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace fsdp2::detail
