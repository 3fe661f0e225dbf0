#include "fsdp/trace.h"

#include <utility>

namespace fsdp2::detail {

TraceListener trace_listener;

void set_trace(TraceListener listener) { trace_listener = std::move(listener); }

}  // namespace fsdp2::detail
