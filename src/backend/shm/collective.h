#pragma once

// Collectives over memory that the ranks share. See Note [Rounds].

#include <c10/util/ArrayRef.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <memory>
#include <vector>

#include "backend/shm/parts.h"
#include "backend/shm/reduce.h"
#include "backend/shm/signals.h"
#include "backend/shm/team.h"

namespace fsdp2::detail::shm {

enum class Kind : uint8_t {
  kBarrier,
  kBroadcast,
  kAllReduce,
  kReduce,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
};

/// What all ranks of a call have to agree on, and each tells the others.
struct Call {
  Kind kind = Kind::kBarrier;
  at::ScalarType dtype = at::kByte;
  c10d::ReduceOp::RedOpType reduce_op = c10d::ReduceOp::UNUSED;
  int32_t root = -1;   // in the group
  uint64_t bytes = 0;  // of one rank's part; 0 for an all-to-all, whose parts differ
  double factor = 1;   // of PREMUL_SUM; may differ between ranks

  bool agrees_with(const Call& other) const {
    return kind == other.kind && dtype == other.dtype && reduce_op == other.reduce_op && root == other.root &&
           bytes == other.bytes;
  }
};

const char* name_of(Kind kind);

/// One collective call of this rank. A broadcast, all-reduce and reduce work in `out`, of one part.
struct Collective {
  Call call;
  Parts in, out;
  std::vector<uint64_t> send_bytes, receive_bytes;  // all-to-all: of the parts in `in` and `out`
  std::chrono::milliseconds timeout{};              // 0: that of the group
};

class CollectiveEngine {
 public:
  explicit CollectiveEngine(std::shared_ptr<Team> team);

  /// Blocks until this rank is done. One thread at a time. Errors: kInvalidArgument where the ranks' calls differ (the
  /// group works on), kTimeout and kPeerFailed (it does not).
  void run(const Collective& collective);
  uint64_t calls() const { return calls_; }

 private:
  static constexpr size_t kSlots = Layout::kSlots;

  std::byte* chunk(int rank, uint64_t round) const { return team_->at(layout_.chunk(rank, round % kSlots)); }
  void open(uint64_t round);
  void agree(const Call& call, uint64_t round);
  template <class Put, class Take>
  void rounds(const Call& call, size_t count, Put&& put, Take&& take);
  void wait_for_all(uint64_t round) { produced_.wait(round + 1, waiting_); }
  void reduce(const Collective& collective, const Parts& own, int own_part, size_t offset, size_t bytes, uint64_t round,
              size_t place, std::byte* to = nullptr);
  void put(const Parts& parts, int part, size_t offset, size_t bytes, std::byte* to) const;
  void take(const Parts& parts, int part, size_t offset, size_t bytes, const std::byte* from) const;

  void broadcast(const Collective& collective);
  void all_reduce(const Collective& collective);
  void all_reduce_in_parts(const Collective& collective);
  void reduce_to_root(const Collective& collective);
  void gather(const Collective& collective, bool everywhere);
  void scatter(const Collective& collective);
  void reduce_scatter(const Collective& collective);
  void all_to_all(const Collective& collective);

  std::shared_ptr<Team> team_;
  const Layout& layout_;
  const int rank_, size_;
  Signals produced_;  // rounds of which a rank has written its chunk
  Signals consumed_;  // rounds of which a rank has read the chunks of all others
  uint64_t round_ = 0;
  uint64_t calls_ = 0;
  std::vector<double> factors_;  // of the ranks, in this call
  std::vector<const void*> sources_;
  bool past_cache_ = false;  // more is written than the cache holds
  Waiting waiting_;
};

}  // namespace fsdp2::detail::shm
