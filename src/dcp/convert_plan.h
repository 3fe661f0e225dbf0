#pragma once

// What a conversion writes, under which names.

#include <fsdp2/dcp/convert.h>

#include <string>
#include <vector>

#include "dcp/tensor_source.h"

namespace fsdp2::dcp::detail {

struct ConvertPlan {
  struct Entry {
    std::string name;  // in the destination
    Path path;
    size_t item = 0;         // of the source
    at::ScalarType dtype{};  // in the destination; of tensors
    std::vector<int64_t> sizes = {};
  };
  std::vector<Entry> tensors, values;

  uint64_t bytes(const Entry& tensor) const;
};

/// Chooses, renames, casts and ties; notes in `report` what it did. kInvalidArgument where an option makes no sense for
/// this source.
ConvertPlan make_plan(TensorSource& source, const ConvertOptions& options, ConvertReport& report);

}  // namespace fsdp2::dcp::detail
