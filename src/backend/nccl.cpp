// The only file that includes a CUDA header. Built where libtorch has CUDA and nccl.h is found.

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "backend/backend.h"

namespace fsdp2::detail::nccl_backend {

bool is_available() { return true; }

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = request.timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(request.store, request.rank, request.world_size, options);
}

}  // namespace fsdp2::detail::nccl_backend
