#pragma once

// What groups do, in the order of time. For tests and tools; no part of the API contract.

#include <functional>
#include <string>

#include <fsdp2/export.h>

namespace fsdp2::detail {

/// `event`: "unshard" (a gather starts), "forward" (a module begins, its parameters whole), "reshard" (whole
/// parameters are freed), "backward" (a module's backward begins, its parameters whole), "reduce" (a reduction of
/// gradients starts). `module`: its name from the root ("" is the root), those of a list joined by ", ".
using TraceListener = std::function<void(const char* event, const std::string& module)>;
/// An empty one switches tracing off. Called on the thread that does the work; not to be set while others run.
FSDP2_API void set_trace(TraceListener listener);

}  // namespace fsdp2::detail
