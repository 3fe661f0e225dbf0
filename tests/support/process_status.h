#pragma once

#include <cstdint>
#include <fstream>
#include <string>

namespace fsdp2::testing {

/// A number of /proc/self/status, e.g. "VmRSS" (KiB) or "Threads"; -1 where there is none of that name.
inline int64_t process_status(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field + ":", 0) == 0) return std::stoll(line.substr(field.size() + 1));
  }
  return -1;
}

}  // namespace fsdp2::testing
