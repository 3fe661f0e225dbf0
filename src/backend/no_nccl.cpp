// Stands in for nccl.cpp where libtorch has no CUDA.

#include <fsdp2/error.h>

#include "backend/backend.h"

namespace fsdp2::detail::nccl_backend {

bool is_available() { return false; }

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest&) {
  FSDP2_THROW(kUnsupported, "[process_group] backend \"nccl\" needs a libtorch with CUDA and NCCL; this build has "
              "none: use backend \"gloo\", or build against a CUDA libtorch");
}

}  // namespace fsdp2::detail::nccl_backend
