#pragma once

// State dicts with whole tensors, or with tensors on the CPU.

#include <fsdp2/dcp/state_dict.h>

#include <functional>

namespace fsdp2::dcp::detail {

/// What `collect` gives, in the form that the options ask for. Collective with full_state_dict: an error of `collect`
/// on any rank is one on all, and so are dicts whose DTensors differ between ranks of a mesh.
StateDict in_requested_form(const StateDictOptions& options, const std::function<StateDict()>& collect);

/// Calls `visit(name, value)` for every tensor in `value`, in order; `visit` may assign to it.
void each_tensor(Value& value, const std::string& name, const std::function<void(const std::string&, Value&)>& visit);

}  // namespace fsdp2::dcp::detail
