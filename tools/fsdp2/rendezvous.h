#pragma once

// The key-value store of a job and what the launchers of its nodes tell each other through it.

#include <memory>
#include <optional>
#include <string>

#include "run_options.h"

namespace fsdp2::tool {

/// Node 0 hosts a c10d::TCPStore that all ranks, C++ and Python, join as clients
/// (TORCHELASTIC_USE_AGENT_STORE=True): the port is bound once and never given up, so no other job
/// can take it.
class Rendezvous {
 public:
  /// Waits for the launchers of all nodes. Throws fsdp2::Error (kIo, kTimeout naming the nodes that
  /// never came).
  explicit Rendezvous(const RunOptions& options);
  ~Rendezvous();

  int port() const;
  int world_size() const { return world_size_; }
  int first_rank() const { return first_rank_; }         // global rank of this node's local rank 0
  const std::string& run_id() const { return run_id_; }  // the same on all nodes

  /// Tells the other nodes why this one stops. Only the first call of a job counts.
  void publish_failure(const std::string& cause) noexcept;
  /// What another node published, or that node 0 cannot be reached any more.
  std::optional<std::string> failure_elsewhere() noexcept;
  /// Node 0 keeps the store until the other nodes are done, for at most `seconds`.
  void leave(double seconds) noexcept;

 private:
  struct Store;
  std::unique_ptr<Store> store_;
  int num_nodes_, node_rank_;
  int world_size_ = 0, first_rank_ = 0;
  std::string run_id_;
};

}  // namespace fsdp2::tool
