#pragma once

// How much of this machine the process may use.

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp2::tool {

struct Cores {
  int online = 1;               // of the machine
  int affinity = 1;             // that this process may run on
  std::optional<double> quota;  // of its control groups, in cores' time
  int usable = 1;               // the least of them, at least 1
};
Cores cores();

/// The tightest limits of the control groups that this process is in (versions 1 and 2), where there are any.
std::optional<uint64_t> cgroup_memory_limit();
std::optional<uint64_t> cgroup_process_limit();

/// That libtorch can use.
int usable_gpus();

/// A line "Name:  123 kB" of /proc/meminfo, in bytes.
uint64_t meminfo(const std::string& name);

}  // namespace fsdp2::tool
