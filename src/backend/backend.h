#pragma once

// One file per communication library; each offers is_available() and create().

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace fsdp2::detail {

struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout{};
  bool single_host = false;  // every rank is known to be on this host
};

namespace gloo_backend {
c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request);
}  // namespace gloo_backend

namespace nccl_backend {
/// Whether this library was built with NCCL.
bool is_available();
c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request);
}  // namespace nccl_backend

}  // namespace fsdp2::detail
