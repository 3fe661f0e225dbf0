#pragma once

#include <fsdp2/detail/trace.h>

namespace fsdp2::detail {

extern TraceListener trace_listener;

inline void trace(const char* event, const std::string& module) {
  if (trace_listener) [[unlikely]] {
    trace_listener(event, module);
  }
}

}  // namespace fsdp2::detail
