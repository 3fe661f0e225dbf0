#pragma once

// Names of dtypes in checkpoints, and which casts keep every value.

#include <c10/core/ScalarType.h>

#include <optional>
#include <string_view>

namespace fsdp2::dcp::detail {

/// "float32" for kFloat; kUnsupported for a type that a checkpoint cannot hold.
std::string_view dtype_name(at::ScalarType type);
std::optional<at::ScalarType> dtype_from_name(std::string_view name);

/// The class in module torch that stands for a storage of that type; empty where Python has none
/// (then UntypedStorage and the dtype are written).
std::string_view storage_class(at::ScalarType type);
std::optional<at::ScalarType> dtype_of_storage_class(std::string_view name);

/// True if some value of `from` has no equal in `to`.
bool is_narrowing(at::ScalarType from, at::ScalarType to);

}  // namespace fsdp2::dcp::detail
