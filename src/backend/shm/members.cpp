#include "backend/shm/members.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <c10/util/StringUtil.h>

namespace fsdp2::detail::shm {

Members::Members(File file, std::shared_ptr<SharedMemory> memory, MemberState* states, int rank,
                 std::vector<int> global_ranks, std::chrono::milliseconds timeout)
    : file_(std::move(file)),
      memory_(std::move(memory)),
      states_(states),
      rank_(rank),
      global_ranks_(std::move(global_ranks)),
      timeout_(timeout) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank_;
  lock.l_len = 1;
  FSDP2_CHECK(::fcntl(file_.fd(), F_SETLK, &lock) == 0, kIo,
              "[shm] locking a byte of shared memory: ", std::strerror(errno));
  MemberState& mine = states_[rank_];
  ::sched_getaffinity(0, sizeof(mine.cpus), &mine.cpus);
  mine.pid.store(::getpid());
  mine.state.store(MemberState::kMember);
}

Members::~Members() {
  if (states_[rank_].pid.load() != ::getpid()) return;  // a forked child is no rank
  uint32_t expected = MemberState::kMember;
  states_[rank_].state.compare_exchange_strong(expected, MemberState::kLeft);
}

void Members::count_processors(int host_ranks) {
  cpu_set_t all;
  CPU_ZERO(&all);
  bool equal = true;
  for (int rank = 0; rank < size(); ++rank) {
    CPU_OR(&all, &all, &states_[rank].cpus);
    equal &= CPU_EQUAL(&states_[rank].cpus, &states_[0].cpus) != 0;
  }
  // Ranks that are pinned to processors of their own leave room for the ranks of other groups.
  crowded_ = CPU_COUNT(&all) < (equal ? std::max(host_ranks, size()) : size());
}

bool Members::is_process_gone(int rank) const {
  if (states_[rank].pid.load() == ::getpid())
    return false;  // ranks may be threads; a process never meets its own locks
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return ::fcntl(file_.fd(), F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

void Members::check_alive(int rank, const std::string& what) const {
  const MemberState& member = states_[rank];
  const uint32_t state = member.state.load();
  FSDP2_CHECK(state != MemberState::kFailed, kPeerFailed, "[shm] ", what, ": ", name(rank),
              " gave up earlier: ", member.failure);
  FSDP2_CHECK(state != MemberState::kLeft, kPeerFailed, "[shm] ", what, ": ", name(rank),
              " has left the group (destroy_process_group, or the group was dropped); all ranks must make the same "
              "calls before they leave");
  FSDP2_CHECK(state == MemberState::kAbsent || !is_process_gone(rank), kPeerFailed, "[shm] ", what, ": the process of ",
              name(rank), " (pid ", member.pid.load(), ") is gone: its own output tells why");
}

void Members::fail(const std::string& why) noexcept {
  MemberState& mine = states_[rank_];
  if (mine.state.load() != MemberState::kMember) return;
  std::strncpy(mine.failure, why.c_str(), sizeof(mine.failure) - 1);
  mine.state.store(MemberState::kFailed);
}

void Members::check_usable() const {
  const MemberState& mine = states_[rank_];
  FSDP2_CHECK(mine.state.load() != MemberState::kFailed, kPeerFailed,
              "[shm] this group cannot be used any more, an operation on it failed: ", mine.failure);
}

std::string Members::names(const std::vector<int>& ranks) const {
  std::vector<int> numbers;
  for (const int rank : ranks) numbers.push_back(global_ranks_[static_cast<size_t>(rank)]);
  return c10::str(numbers.size() == 1 ? "rank " : "ranks ", c10::Join(", ", numbers));
}

}  // namespace fsdp2::detail::shm
