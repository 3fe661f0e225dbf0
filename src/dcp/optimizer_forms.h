#pragma once

// The forms in which optimizer state dicts come: nested by name, flat, and nested by number.

#include <torch/optim/optimizer.h>

#include <vector>

#include "dcp/model_view.h"

namespace fsdp2::dcp::detail {

/// {"state": {fqn: {...}}, "param_groups": [...]} as `state.<fqn>.<field>` and `param_groups.<fqn>.<key>`.
StateDict flat_form(const StateDict& nested);

/// Any form as the nested one by name. `optimizers` and `view` say which names and groups there are. With the flat form
/// every group of an optimizer becomes one group of the result; kInvalidArgument where its parameters disagree about a
/// hyper-parameter (a note and the first one's value if not `strict`).
StateDict nested_form(const StateDict& state, const std::vector<torch::optim::Optimizer*>& optimizers,
                      const ModelView& view, bool strict);

}  // namespace fsdp2::dcp::detail
