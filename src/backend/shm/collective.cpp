#include "backend/shm/collective.h"

#include <c10/util/StringUtil.h>

#include <array>
#include <cstring>

#include <fsdp2/error.h>

#include "backend/shm/copy.h"

namespace fsdp2::detail::shm {

// Note [Rounds]
// A group counts rounds, and so does every rank, alike. In a round a rank writes a chunk of its data for the others
// into its own slot, posts `produced`, waits for the ranks whose chunks it needs, reads them, and posts `consumed`. A
// slot is used again kSlots rounds later, when all have consumed it. So a call of any size moves through a few chunks
// that stay in the processors' caches, and a rank writes its next chunk before it reads, which keeps the others busy.
// The first round of a call also carries what the call is; ranks whose calls differ stop after it, at the same count.

namespace {

// Above this an all-reduce divides the work: each rank reduces a part and hands it to the others.
constexpr size_t kReduceAloneBytes = 64 << 10;
// Outputs larger than this leave a second-level cache before they are read again.
constexpr size_t kPastCacheBytes = 4 << 20;

size_t count_of(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit; }

/// How much of [offset, offset + unit) lies below `end`.
size_t part_of(size_t offset, size_t unit, size_t end) { return offset < end ? std::min(unit, end - offset) : 0; }

std::string describe(const Call& call, const Members& members) {
  return c10::str(
      name_of(call.kind), call.reduce_op == c10d::ReduceOp::UNUSED ? "" : c10::str(" (", name_of(call.reduce_op), ")"),
      call.root < 0 ? "" : c10::str(" with root ", members.name(call.root)), " of ", call.bytes, " bytes ", call.dtype);
}

}  // namespace

const char* name_of(Kind kind) {
  static constexpr std::array<const char*, 9> kNames = {"barrier", "broadcast",      "all_reduce",
                                                        "reduce",  "all_gather",     "gather",
                                                        "scatter", "reduce_scatter", "all_to_all"};
  return kNames[static_cast<size_t>(kind)];
}

CollectiveEngine::CollectiveEngine(std::shared_ptr<Team> team)
    : team_(std::move(team)),
      layout_(team_->layout()),
      rank_(team_->members().rank()),
      size_(team_->members().size()),
      produced_(team_->shared_members(), team_->memory(), team_->at(layout_.produced)),
      consumed_(team_->shared_members(), team_->memory(), team_->at(layout_.consumed)),
      factors_(static_cast<size_t>(size_), 1),
      sources_(static_cast<size_t>(size_)) {}

void CollectiveEngine::run(const Collective& collective) {
  team_->members().check_usable();
  const Call& call = collective.call;
  waiting_ = {name_of(call.kind), ++calls_, call.bytes, collective.timeout};
  const bool many_parts = call.kind == Kind::kAllGather || call.kind == Kind::kGather;
  past_cache_ = collective.out.bytes() * (many_parts ? static_cast<size_t>(size_) : 1) > kPastCacheBytes;
  switch (call.kind) {
    case Kind::kBarrier:
      return rounds(
          call, 0, [](size_t, uint64_t) {}, [](size_t, uint64_t) {});
    case Kind::kBroadcast:
      return broadcast(collective);
    case Kind::kAllReduce:
      return all_reduce(collective);
    case Kind::kReduce:
      return reduce_to_root(collective);
    case Kind::kAllGather:
      return gather(collective, true);
    case Kind::kGather:
      return gather(collective, false);
    case Kind::kScatter:
      return scatter(collective);
    case Kind::kReduceScatter:
      return reduce_scatter(collective);
    case Kind::kAllToAll:
      return all_to_all(collective);
  }
}

/// Until this rank's slot for the round is free.
void CollectiveEngine::open(uint64_t round) {
  if (round >= kSlots) consumed_.wait(round + 1 - kSlots, waiting_);
}

/// Waits for the calls of all ranks; the round must be produced.
void CollectiveEngine::agree(const Call& call, uint64_t round) {
  wait_for_all(round);
  bool equal = true;
  for (int rank = 0; rank < size_; ++rank) {
    const auto& other = *reinterpret_cast<const Call*>(team_->at(layout_.header(rank, round % kSlots)));
    equal &= call.agrees_with(other);
    factors_[static_cast<size_t>(rank)] = other.factor;
  }
  if (equal) [[likely]]
    return;
  // Every rank sees the same calls, so all of them stop here.
  std::string calls;
  for (int rank = 0; rank < size_; ++rank) {
    const auto& other = *reinterpret_cast<const Call*>(team_->at(layout_.header(rank, round % kSlots)));
    calls += c10::str(rank == 0 ? "" : "; ", team_->members().name(rank), " calls ", describe(other, team_->members()));
  }
  consumed_.post(round + 1);
  round_ = round + 1;
  FSDP2_THROW(kInvalidArgument, "[shm] call number ", calls_, " of a group differs between its ranks: ", calls,
              ". All ranks must make the same calls, with equal sizes and dtypes, in the same order");
}

/// put(i, round) writes chunk i of `count`, take(i, round) waits for what it reads.
template <class Put, class Take>
void CollectiveEngine::rounds(const Call& call, size_t count, Put&& put, Take&& take) {
  static_assert(sizeof(Call) <= Layout::kHeaderBytes);
  const uint64_t first = round_;
  open(first);
  std::memcpy(team_->at(layout_.header(rank_, first % kSlots)), &call, sizeof(call));
  if (count > 0) put(size_t{0}, first);
  produced_.post(first + 1);
  agree(call, first);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t round = first + i;
    if (i + 1 < count) {
      open(round + 1);
      put(i + 1, round + 1);
      produced_.post(round + 2);
    }
    take(i, round);
    consumed_.post(round + 1);
  }
  if (count == 0) consumed_.post(first + 1);
  round_ = first + std::max(count, size_t{1});
}

void CollectiveEngine::put(const Parts& parts, int part, size_t offset, size_t bytes, std::byte* to) const {
  parts.walk(part, offset, bytes, [&](std::byte* from, size_t position, size_t n) {
    copy_bytes(to + position, from, n, /*past_cache=*/false);
  });
}

void CollectiveEngine::take(const Parts& parts, int part, size_t offset, size_t bytes, const std::byte* from) const {
  parts.walk(part, offset, bytes,
             [&](std::byte* to, size_t position, size_t n) { copy_bytes(to, from + position, n, past_cache_); });
}

/// [offset, offset + bytes) of `out`: this rank's values from a part of `own`, those of the others `place` bytes into
/// their chunks. Where `to` is given it takes the result instead of `out`.
void CollectiveEngine::reduce(const Collective& collective, const Parts& own, int own_part, size_t offset, size_t bytes,
                              uint64_t round, size_t place, std::byte* to) {
  const Reduction reduction{collective.call.reduce_op, collective.call.dtype, factors_, past_cache_ && to == nullptr};
  own.walk_both(collective.out, own_part, 0, offset, bytes,
                [&](std::byte* mine, std::byte* out, size_t position, size_t n) {
                  for (int rank = 0; rank < size_; ++rank) {
                    sources_[static_cast<size_t>(rank)] = rank == rank_ ? mine : chunk(rank, round) + place + position;
                  }
                  reduce_in_order(reduction, to != nullptr ? to + position : out, sources_, n);
                });
}

void CollectiveEngine::broadcast(const Collective& collective) {
  constexpr size_t kUnit = Layout::kChunkBytes;
  const size_t bytes = collective.out.bytes();
  const bool is_root = collective.call.root == rank_;
  rounds(
      collective.call, count_of(bytes, kUnit),
      [&](size_t i, uint64_t round) {
        if (is_root && size_ > 1)
          put(collective.out, 0, i * kUnit, part_of(i * kUnit, kUnit, bytes), chunk(rank_, round));
      },
      [&](size_t i, uint64_t round) {
        if (is_root) return;
        produced_.wait_for(collective.call.root, round + 1, waiting_);
        take(collective.out, 0, i * kUnit, part_of(i * kUnit, kUnit, bytes), chunk(collective.call.root, round));
      });
}

void CollectiveEngine::all_reduce(const Collective& collective) {
  const Parts& parts = collective.out;
  const size_t bytes = parts.bytes();
  if (size_ > 1 && bytes * static_cast<size_t>(size_) > 2 * kReduceAloneBytes) return all_reduce_in_parts(collective);
  constexpr size_t kUnit = Layout::kChunkBytes;
  rounds(
      collective.call, count_of(bytes, kUnit),
      [&](size_t i, uint64_t round) {
        if (size_ > 1) put(parts, 0, i * kUnit, part_of(i * kUnit, kUnit, bytes), chunk(rank_, round));
      },
      [&](size_t i, uint64_t round) {
        wait_for_all(round);
        reduce(collective, parts, 0, i * kUnit, part_of(i * kUnit, kUnit, bytes), round, 0);
      });
}

// Two rounds for a stretch of `size_` units: all hand unit r to rank r, which reduces it and hands it to all.
void CollectiveEngine::all_reduce_in_parts(const Collective& collective) {
  const Parts& parts = collective.out;
  const size_t bytes = parts.bytes();
  const size_t unit = Layout::unit(size_);
  const size_t stretch = unit * static_cast<size_t>(size_);
  const auto offset = [&](size_t i, int rank) { return i / 2 * stretch + unit * static_cast<size_t>(rank); };
  const auto length = [&](size_t i, int rank) { return part_of(offset(i, rank), unit, bytes); };
  const auto place = [&](int rank) { return unit * static_cast<size_t>(rank); };
  rounds(
      collective.call, 2 * count_of(bytes, stretch),
      [&](size_t i, uint64_t round) {
        if (i % 2 == 0) {
          for (int rank = 0; rank < size_; ++rank) {
            if (rank != rank_) put(parts, 0, offset(i, rank), length(i, rank), chunk(rank_, round) + place(rank));
          }
        } else {
          wait_for_all(round - 1);
          reduce(collective, parts, 0, offset(i, rank_), length(i, rank_), round - 1, place(rank_),
                 chunk(rank_, round));
        }
      },
      [&](size_t i, uint64_t round) {
        if (i % 2 == 0) return;  // read when the next round was written
        take(parts, 0, offset(i, rank_), length(i, rank_), chunk(rank_, round));
        for (int step = 1; step < size_; ++step) {
          const int rank = (rank_ + step) % size_;
          produced_.wait_for(rank, round + 1, waiting_);
          take(parts, 0, offset(i, rank), length(i, rank), chunk(rank, round));
        }
      });
}

void CollectiveEngine::reduce_to_root(const Collective& collective) {
  constexpr size_t kUnit = Layout::kChunkBytes;
  const Parts& parts = collective.out;
  const size_t bytes = parts.bytes();
  const bool is_root = collective.call.root == rank_;
  rounds(
      collective.call, count_of(bytes, kUnit),
      [&](size_t i, uint64_t round) {
        if (!is_root) put(parts, 0, i * kUnit, part_of(i * kUnit, kUnit, bytes), chunk(rank_, round));
      },
      [&](size_t i, uint64_t round) {
        if (!is_root) return;
        wait_for_all(round);
        reduce(collective, parts, 0, i * kUnit, part_of(i * kUnit, kUnit, bytes), round, 0);
      });
}

void CollectiveEngine::gather(const Collective& collective, bool everywhere) {
  constexpr size_t kUnit = Layout::kChunkBytes;
  const size_t bytes = collective.in.bytes();
  const bool reads = everywhere || collective.call.root == rank_;
  rounds(
      collective.call, count_of(bytes, kUnit),
      [&](size_t i, uint64_t round) {
        const size_t offset = i * kUnit, n = part_of(offset, kUnit, bytes);
        if (size_ > 1 && (everywhere || !reads)) put(collective.in, 0, offset, n, chunk(rank_, round));
        if (!reads) return;
        collective.in.walk_both(collective.out, 0, rank_, offset, n,
                                [&](std::byte* from, std::byte* to, size_t, size_t count) {
                                  if (from != to) copy_bytes(to, from, count, past_cache_);
                                });
      },
      [&](size_t i, uint64_t round) {
        if (!reads) return;
        const size_t offset = i * kUnit, n = part_of(offset, kUnit, bytes);
        for (int step = 1; step < size_; ++step) {  // not all from the same rank at once
          const int rank = (rank_ + step) % size_;
          produced_.wait_for(rank, round + 1, waiting_);
          take(collective.out, rank, offset, n, chunk(rank, round));
        }
      });
}

void CollectiveEngine::scatter(const Collective& collective) {
  const size_t unit = Layout::unit(size_);
  const size_t bytes = collective.out.bytes();
  const int root = collective.call.root;
  rounds(
      collective.call, count_of(bytes, unit),
      [&](size_t i, uint64_t round) {
        if (root != rank_) return;
        const size_t offset = i * unit, n = part_of(offset, unit, bytes);
        for (int rank = 0; rank < size_; ++rank) {
          if (rank != rank_)
            put(collective.in, rank, offset, n, chunk(rank_, round) + unit * static_cast<size_t>(rank));
        }
        collective.in.walk_both(collective.out, rank_, 0, offset, n,
                                [&](std::byte* from, std::byte* to, size_t, size_t count) {
                                  if (from != to) copy_bytes(to, from, count, past_cache_);
                                });
      },
      [&](size_t i, uint64_t round) {
        if (root == rank_) return;
        produced_.wait_for(root, round + 1, waiting_);
        take(collective.out, 0, i * unit, part_of(i * unit, unit, bytes),
             chunk(root, round) + unit * static_cast<size_t>(rank_));
      });
}

void CollectiveEngine::reduce_scatter(const Collective& collective) {
  const size_t unit = Layout::unit(size_);
  const size_t bytes = collective.out.bytes();
  rounds(
      collective.call, count_of(bytes, unit),
      [&](size_t i, uint64_t round) {
        const size_t offset = i * unit, n = part_of(offset, unit, bytes);
        for (int rank = 0; rank < size_; ++rank) {
          if (rank != rank_)
            put(collective.in, rank, offset, n, chunk(rank_, round) + unit * static_cast<size_t>(rank));
        }
      },
      [&](size_t i, uint64_t round) {
        wait_for_all(round);
        const size_t offset = i * unit, n = part_of(offset, unit, bytes);
        reduce(collective, collective.in, rank_, offset, n, round, unit * static_cast<size_t>(rank_));
      });
}

void CollectiveEngine::all_to_all(const Collective& collective) {
  const auto size = static_cast<size_t>(size_);
  const size_t unit = Layout::unit(size_);
  // Only the ranks know their sizes: the first round tells everybody all of them.
  std::vector<uint64_t> sends(size * size), receives(size * size);
  rounds(
      collective.call, 1,
      [&](size_t, uint64_t round) {
        std::memcpy(chunk(rank_, round), collective.send_bytes.data(), size * sizeof(uint64_t));
        std::memcpy(chunk(rank_, round) + size * sizeof(uint64_t), collective.receive_bytes.data(),
                    size * sizeof(uint64_t));
      },
      [&](size_t, uint64_t round) {
        for (int rank = 0; rank < size_; ++rank) {
          const size_t row = static_cast<size_t>(rank) * size;
          std::memcpy(&sends[row], chunk(rank, round), size * sizeof(uint64_t));
          std::memcpy(&receives[row], chunk(rank, round) + size * sizeof(uint64_t), size * sizeof(uint64_t));
        }
      });
  for (size_t from = 0; from < size; ++from) {
    for (size_t to = 0; to < size; ++to) {
      const uint64_t sent = sends[from * size + to], received = receives[to * size + from];
      FSDP2_CHECK(sent == received, kInvalidArgument, "[shm] all_to_all number ", calls_,
                  " of a group: ", team_->members().name(static_cast<int>(from)), " sends ", sent, " bytes to ",
                  team_->members().name(static_cast<int>(to)), ", which expects ", received,
                  "; split sizes must agree");
    }
  }
  past_cache_ = false;
  Call data = collective.call;
  data.bytes = *std::max_element(sends.begin(), sends.end());
  const size_t me = static_cast<size_t>(rank_);
  if (sends[me * size + me] > 0) {
    std::memcpy(collective.out.piece(0).of(rank_), collective.in.piece(0).of(rank_), sends[me * size + me]);
  }
  rounds(
      data, count_of(data.bytes, unit),
      [&](size_t i, uint64_t round) {
        for (size_t rank = 0; rank < size; ++rank) {
          const size_t n = part_of(i * unit, unit, sends[me * size + rank]);
          if (rank == me || n == 0) continue;
          std::memcpy(chunk(rank_, round) + unit * rank, collective.in.piece(0).of(static_cast<int>(rank)) + i * unit,
                      n);
        }
      },
      [&](size_t i, uint64_t round) {
        for (int step = 1; step < size_; ++step) {
          const int rank = (rank_ + step) % size_;
          const size_t n = part_of(i * unit, unit, receives[me * size + static_cast<size_t>(rank)]);
          if (n == 0) continue;
          produced_.wait_for(rank, round + 1, waiting_);
          std::memcpy(collective.out.piece(0).of(rank) + i * unit, chunk(rank, round) + unit * me, n);
        }
      });
}

}  // namespace fsdp2::detail::shm
