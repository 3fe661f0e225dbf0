#pragma once

// What one rank has to save.

#include <fsdp2/dcp/dcp.h>

#include <optional>
#include <string>
#include <vector>

#include "dcp/flatten.h"
#include "dcp/item.h"

namespace fsdp2::dcp::detail {

/// What this rank could write for one key.
struct SaveItem {
  std::string fqn;
  Path path;
  std::optional<TensorEntry> tensor;  // chunks: those of this rank; none for a value
  std::vector<at::Tensor> data;       // one per chunk, sharing memory with the state
  PickledValue value;
};

/// Of `state`, which changes only where a Stateful gives its own. kInvalidArgument, kUnsupported naming the key that
/// cannot be saved.
std::vector<SaveItem> make_save_items(StateDict& state, int rank);

}  // namespace fsdp2::dcp::detail
