#include "backend/shm/signals.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <limits>

#include <c10/util/StringUtil.h>

namespace fsdp2::detail::shm {

namespace {

using Clock = std::chrono::steady_clock;

// Waking a sleeper takes tens of microseconds, so a rank that has a processor of its own first looks for a while.
constexpr auto kSpin = std::chrono::microseconds(200);
// How often a sleeper looks whether those it waits for still live.
constexpr auto kCheck = std::chrono::milliseconds(20);

void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// The half of the counter that changes with every post.
uint32_t* futex_word(std::atomic<uint64_t>& value) {
  return reinterpret_cast<uint32_t*>(&value) + (std::endian::native == std::endian::little ? 0 : 1);
}

}  // namespace

std::string Waiting::text() const {
  return sequence == 0 ? std::string(what) : c10::str(what, " number ", sequence, " of its group (", bytes, " bytes)");
}

Signals::Signals(std::shared_ptr<Members> members, std::shared_ptr<SharedMemory> memory, std::byte* lines)
    : members_(std::move(members)), memory_(std::move(memory)), lines_(reinterpret_cast<Line*>(lines)) {}

bool Signals::reached(uint64_t value) const noexcept {
  for (int rank = 0; rank < members_->size(); ++rank) {
    if (!reached_by(rank, value)) return false;
  }
  return true;
}

void Signals::wake(Line& line) noexcept {
  ::syscall(SYS_futex, futex_word(line.value), FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

void Signals::wait(uint64_t value, const Waiting& waiting) {
  if (!reached(value)) wait_longer(0, members_->size(), value, waiting);
}

void Signals::wait_longer(int begin, int end, uint64_t value, const Waiting& waiting) {
  // Ranks below `begin` are there.
  const auto advance = [&] {
    while (begin < end && reached_by(begin, value)) ++begin;
    return begin == end;
  };
  if (members_->crowded()) {
    for (int turn = 0; turn < 2; ++turn) {
      ::sched_yield();
      if (advance()) return;
    }
  } else {
    const auto until = Clock::now() + kSpin;
    do {
      for (int turn = 0; turn < 32; ++turn) {
        if (advance()) return;
        relax();
      }
    } while (Clock::now() < until);
  }
  const auto timeout = waiting.timeout.count() > 0 ? waiting.timeout : members_->timeout();
  const auto start = Clock::now();
  auto next_check = start + kCheck;
  while (!advance()) {
    Line& line = lines_[begin];
    line.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t seen = line.value.load(std::memory_order_seq_cst);
    if (seen < value) {
      const timespec time{0, std::chrono::nanoseconds(kCheck).count()};
      ::syscall(SYS_futex, futex_word(line.value), FUTEX_WAIT, static_cast<uint32_t>(seen), &time, nullptr, 0);
    }
    line.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (Clock::now() < next_check) continue;
    next_check = Clock::now() + kCheck;
    try {
      std::vector<int> missing;
      for (int rank = begin; rank < end; ++rank) {
        if (reached_by(rank, value)) continue;
        try {
          members_->check_alive(rank, waiting.text());
        } catch (const Error&) {
          if (!reached_by(rank, value)) throw;  // else it came, and left after that
        }
        missing.push_back(rank);
      }
      FSDP2_CHECK(missing.empty() || Clock::now() - start < timeout, kTimeout, "[shm] ", waiting.text(),
                  " timed out after ", timeout.count(), " ms: ", members_->names(missing),
                  " did not come; check that all ranks make the same calls in the same order, or raise "
                  "ProcessGroupOptions::timeout");
    } catch (const Error& error) {
      members_->fail(error.what_without_backtrace());
      throw;
    }
  }
}

}  // namespace fsdp2::detail::shm
