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

/// The half of the counter that changes with every post.
uint32_t* futex_word(std::atomic<uint64_t>& value) {
  return reinterpret_cast<uint32_t*>(&value) + (std::endian::native == std::endian::little ? 0 : 1);
}

}  // namespace

void pause_a_moment(bool crowded) noexcept {
  if (crowded) {
    ::sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void Line::wake() noexcept {
  ::syscall(SYS_futex, futex_word(value), FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

void Line::sleep(uint64_t seen, std::chrono::nanoseconds time) noexcept {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (value.load(std::memory_order_seq_cst) == seen) {
    const timespec limit{0, time.count()};
    ::syscall(SYS_futex, futex_word(value), FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr, 0);
  }
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

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

void Signals::wait(uint64_t value, const Waiting& waiting) {
  if (!reached(value)) wait_longer(0, members_->size(), value, waiting);
}

void Signals::wait_longer(int begin, int end, uint64_t value, const Waiting& waiting) {
  // Once one wait has failed, the next ones must not take their time too.
  members_->check_usable();
  // Ranks below `begin` are there.
  const auto advance = [&] {
    while (begin < end && reached_by(begin, value)) ++begin;
    return begin == end;
  };
  // Waking a sleeper takes tens of microseconds, so a rank that has a processor of its own first looks for a while.
  const bool crowded = members_->crowded();
  const auto spin_until = Clock::now() + (crowded ? std::chrono::microseconds(0) : kSpin);
  do {
    for (int turn = 0; turn < (crowded ? 2 : 32); ++turn) {
      if (advance()) return;
      pause_a_moment(crowded);
    }
  } while (Clock::now() < spin_until);
  const auto timeout = waiting.timeout.count() > 0 ? waiting.timeout : members_->timeout();
  const auto start = Clock::now();
  auto next_check = start + kCheckEvery;
  while (!advance()) {
    const uint64_t seen = lines_[begin].value.load(std::memory_order_seq_cst);
    if (seen < value) lines_[begin].sleep(seen, kCheckEvery);
    if (Clock::now() < next_check) continue;
    next_check = Clock::now() + kCheckEvery;
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
