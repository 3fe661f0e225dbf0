#pragma once

// What set_model_state_dict does, in two steps.

#include "dcp/model_view.h"
#include "dcp/value_source.h"

namespace fsdp2::dcp::detail {

/// Parameters and buffers by name, sharing memory.
StateDict collect_model(const ModelView& view, const StateDictOptions& options);

/// Looks at everything that can be wrong with `state`, a dict of `source`, and asks `source` for its tensors.
LoadReport plan_model(const ModelView& view, const StateDict& state, const StateDictOptions& options,
                      ValueSource& source);

}  // namespace fsdp2::dcp::detail
