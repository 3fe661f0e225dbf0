#pragma once

#include <fsdp2/dcp/state_dict.h>

namespace fsdp2::dcp::detail {

/// kUnsupported naming the first field that is set to something not offered yet.
void check_options(const StateDictOptions& options);

}  // namespace fsdp2::dcp::detail
