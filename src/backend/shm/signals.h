#pragma once

// Counters by which ranks tell each other how far they are.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "backend/shm/members.h"

namespace fsdp2::detail::shm {

/// What somebody waits for, in error texts.
struct Waiting {
  const char* what = "";
  uint64_t sequence = 0;  // of the operation on its group, counted from 1; 0 where there is none
  uint64_t bytes = 0;
  std::chrono::milliseconds timeout{};  // 0: that of the group

  std::string text() const;
};

/// A counter in shared memory that others can sleep on.
struct alignas(128) Line {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> sleepers;

  void post(uint64_t next) noexcept {
    value.store(next, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
  }
  void add_one() noexcept {
    value.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
  }
  void wake() noexcept;
  /// Until the value is another one than `seen`, or the time is over.
  void sleep(uint64_t seen, std::chrono::nanoseconds time) noexcept;
};

/// Leaves the processor to others for a moment (a crowded host), or waits a few cycles.
void pause_a_moment(bool crowded) noexcept;

/// For how long to look again and again before sleeping, and how often a sleeper looks whether the others still live.
constexpr auto kSpin = std::chrono::microseconds(200);
constexpr auto kCheckEvery = std::chrono::milliseconds(20);

/// One counter per rank, each in a cache line of its own, in shared memory. Counters only grow.
class Signals {
 public:
  static size_t bytes_for(int size) { return static_cast<size_t>(size) * sizeof(Line); }

  /// `lines`: zeroed memory of `memory`.
  Signals(std::shared_ptr<Members> members, std::shared_ptr<SharedMemory> memory, std::byte* lines);

  /// This rank's counter := value; what was written before is seen by those who have waited for it.
  void post(uint64_t value) noexcept { lines_[members_->rank()].post(value); }
  bool reached_by(int rank, uint64_t value) const noexcept {
    return lines_[rank].value.load(std::memory_order_acquire) >= value;
  }
  bool reached(uint64_t value) const noexcept;

  /// Until every rank has reached `value`. Spins, then sleeps. kTimeout names the missing ranks, kPeerFailed comes as
  /// soon as the process of a missing rank is gone; either makes the group unusable, on the other ranks too:
  /// later waits that are not over already fail at once.
  void wait(uint64_t value, const char* what) { wait(value, Waiting{what}); }
  void wait(uint64_t value, const Waiting& waiting);
  void wait_for(int rank, uint64_t value, const Waiting& waiting) {
    if (!reached_by(rank, value)) wait_longer(rank, rank + 1, value, waiting);
  }

 private:
  void wait_longer(int begin, int end, uint64_t value, const Waiting& waiting);

  std::shared_ptr<Members> members_;
  std::shared_ptr<SharedMemory> memory_;
  Line* lines_;
};

}  // namespace fsdp2::detail::shm
