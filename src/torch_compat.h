#pragma once

// What differs between the supported libtorch releases, and nothing else.

#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <utility>

#define FSDP2_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace fsdp2::detail {

// 2.13 renamed the single-tensor collectives.
inline c10::intrusive_ptr<c10d::Work> c10d_all_gather(c10d::ProcessGroup& group, at::Tensor& out, at::Tensor& in) {
#if FSDP2_TORCH_AT_LEAST(2, 13)
  return group.all_gather_single(out, in);
#else
  return group._allgather_base(out, in);
#endif
}

inline c10::intrusive_ptr<c10d::Work> c10d_reduce_scatter(c10d::ProcessGroup& group, at::Tensor& out, at::Tensor& in,
                                                          const c10d::ReduceScatterOptions& options) {
#if FSDP2_TORCH_AT_LEAST(2, 13)
  return group.reduce_scatter_single(out, in, options);
#else
  return group._reduce_scatter_base(out, in, options);
#endif
}

#if FSDP2_TORCH_AT_LEAST(2, 13)
inline constexpr auto kReduceScatterCoalesced = c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#else
inline constexpr auto kReduceScatterCoalesced = c10d::OpType::COALESCED;
#endif

/// 2.13 has hasBackendForDeviceType() for it.
inline bool has_backend(const c10d::ProcessGroup& group, c10::DeviceType device) {
  for (const c10::Device& each : group.getDeviceTypes()) {
    if (each.type() == device) return true;
  }
  return false;
}

// After release_data_and_set_meta_custom_data_ptr_error_msg_(). Before 2.13 nothing takes its flag back, and the member
// is private: but an explicit instantiation may name it.
#if FSDP2_TORCH_AT_LEAST(2, 13)
inline void allow_data_access(c10::StorageImpl& storage) { storage.clear_data_ptr_access_error_msg_(); }
#else
template <auto kFlag, auto kRefresh>
struct StorageFlags {
  friend void allow_data_access(c10::StorageImpl& storage) {
    storage.*kFlag = false;
    (storage.*kRefresh)();
  }
};
template struct StorageFlags<&c10::StorageImpl::throw_on_immutable_data_ptr_,
                             &c10::StorageImpl::refresh_has_data_ptr_check>;
void allow_data_access(c10::StorageImpl& storage);
#endif

// 2.13 holds autograd nodes by intrusive_ptr, earlier releases by shared_ptr.
#if FSDP2_TORCH_AT_LEAST(2, 13)
using NodePtr = c10::intrusive_ptr<torch::autograd::Node>;
template <class N, class... Args>
c10::intrusive_ptr<N> make_node(Args&&... args) {
  return c10::make_intrusive<N>(std::forward<Args>(args)...);
}
#else
using NodePtr = std::shared_ptr<torch::autograd::Node>;
template <class N, class... Args>
std::shared_ptr<N> make_node(Args&&... args) {
  return std::shared_ptr<N>(new N(std::forward<Args>(args)...), torch::autograd::deleteNode);
}
#endif

}  // namespace fsdp2::detail
