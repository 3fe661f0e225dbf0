#pragma once

// Note [One funnel for unsharded memory]
// Whole parameters get and lose their memory here and nowhere else: the place that counts it, can poison it
// (FSDP2_DEBUG_POISON=1 fills freed memory with NaN patterns, so a stale pointer shows) and can later pool it.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace fsdp2::detail {

using at::Tensor;

/// An uninitialised tensor over a storage without memory that answers any access with `message`.
Tensor make_released(at::IntArrayRef sizes, const at::TensorOptions& options, const std::string& message);

/// Gives the storage of `whole` fresh memory and lets it be used; counts it.
void acquire_unsharded(const Tensor& whole);
/// The same with memory that others own and keep until release_borrowed(); poison does not reach it.
void borrow_unsharded(const Tensor& whole, void* data);
void release_borrowed(const Tensor& whole, const std::string& message);
/// Takes the memory away. Views that autograd saved stay valid objects and throw `message` until acquired again.
void release_unsharded(const Tensor& whole, const std::string& message);

int64_t unsharded_bytes() noexcept;
int64_t unsharded_bytes_peak() noexcept;
void reset_unsharded_peak() noexcept;

}  // namespace fsdp2::detail
