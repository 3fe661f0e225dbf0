#pragma once

// A c10d backend for ranks of one host: everything goes through memory that they share.

#include <fsdp2/process_group.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>
#include <vector>

#include "backend/shm/shared_memory.h"
#include "backend/shm/signals.h"

namespace fsdp2::detail::shm {

class Team;

class ShmBackend : public c10d::Backend {
 public:
  explicit ShmBackend(std::shared_ptr<Team> team);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }

  /// Zeroed, page-aligned memory that every rank of the group maps, and that lives as long as one of them keeps it.
  /// Collective: every rank calls, in the same order, with the same size. `what` names it in errors. kIo, on every
  /// rank, where this host has too little memory left or a limit forbids it.
  std::shared_ptr<SharedMemory> make_memory(size_t bytes, const char* what);
  /// Collective: counters of the group's ranks, all zero.
  std::shared_ptr<Signals> make_signals();

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

 private:
  std::shared_ptr<Team> team_;
  uint64_t barriers_ = 0;
};

/// The backend of a group's CPU tensors; null where that is another one, or where `group` is null.
ShmBackend* shm_backend_of(const ProcessGroup& group);

}  // namespace fsdp2::detail::shm
