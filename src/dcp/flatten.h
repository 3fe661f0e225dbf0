#pragma once

// Nested state dicts and the flat keys of a checkpoint.

#include <fsdp2/dcp/dcp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "dcp/value_rep.h"

namespace fsdp2::dcp::detail {

using Path = std::vector<std::variant<std::string, int64_t>>;

struct Leaf {
  std::string fqn;  // the path joined by dots
  Path path;
  Value* value;  // inside of the dict that was flattened
  Absent absent = Absent::kError;
  StateDict* dict = nullptr;  // that of `absent`, where it is not kError
};

/// A Stateful that flatten() met, and the state that it gave (inside of the dict that was
/// flattened).
struct LoadedObject {
  std::shared_ptr<Stateful> object;
  StateDict* state;
};

/// How deep containers are entered: torch 2.4 and later enter every dict; before, only what holds
/// tensors.
enum class FlattenStyle { kCurrent, kBefore24 };

struct FlattenOptions {
  int rank = 0;                                  ///< where values marked by per_rank() go
  std::vector<LoadedObject>* objects = nullptr;  ///< collects the objects that are met
  FlattenStyle style = FlattenStyle::kCurrent;
};

/// Unshares what it walks through, so that leaves can be assigned. kInvalidArgument: two paths give
/// one name.
std::vector<Leaf> flatten(StateDict& state, const FlattenOptions& options);

/// The reverse. kCorruption naming the key where paths contradict each other.
StateDict unflatten(std::vector<std::pair<Path, Value>> leaves);

}  // namespace fsdp2::dcp::detail
