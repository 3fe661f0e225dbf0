#pragma once

// What the ranks of one group on one host share.

#include <functional>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "backend/shm/layout.h"
#include "backend/shm/members.h"
#include "backend/shm/shared_memory.h"
#include "backend/shm/signals.h"

namespace fsdp2::detail::shm {

class Team {
 public:
  /// Finds the other ranks through the store. Collective. Where it fails it fails on every rank, with the same code:
  /// kInvalidArgument (the ranks are on different hosts), kIo (the system refuses), kTimeout (somebody did not come).
  static std::shared_ptr<Team> join(const BackendRequest& request);

  /// Collective: `step` runs on every rank, and its error is thrown on every rank.
  void together(const char* what, const std::function<void()>& step);
  /// Collective: zeroed memory that all ranks map. kIo on every rank where there is too little.
  std::shared_ptr<SharedMemory> make_memory(size_t bytes, const char* what);
  std::shared_ptr<Signals> make_signals();

  Members& members() { return *members_; }
  const std::shared_ptr<Members>& shared_members() const { return members_; }
  const std::shared_ptr<SharedMemory>& memory() const { return memory_; }
  const Layout& layout() const { return layout_; }
  std::byte* at(size_t offset) const { return memory_->data() + offset; }

 private:
  Team(File file, std::shared_ptr<SharedMemory> memory, const Layout& layout, const BackendRequest& request,
       std::string name);
  void step_barrier(const char* what);

  std::shared_ptr<SharedMemory> memory_;
  Layout layout_;
  std::shared_ptr<Members> members_;
  Signals steps_;
  uint64_t steps_taken_ = 0;
  std::string name_;  // of sockets, with a number behind
  uint64_t files_made_ = 0;
};

}  // namespace fsdp2::detail::shm
