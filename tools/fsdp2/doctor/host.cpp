#include "doctor/host.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <vector>

namespace fsdp2::tool {
namespace {

constexpr uint64_t kUnlimited = uint64_t{1} << 62;  // version 1 says "no limit" by a huge number

struct Folder {
  std::string path;
  bool second_version;
};

/// Of the control groups of this process that rule over `controller`, from its own up to the root. In a container some
/// of them cannot be seen.
std::vector<Folder> cgroup_folders(const std::string& controller) {
  std::vector<Folder> folders;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool second_version = names == ",,";
    if (!second_version && names.find("," + controller + ",") == std::string::npos) continue;
    const std::string root = second_version ? "/sys/fs/cgroup" : "/sys/fs/cgroup/" + controller;
    std::string path = line.substr(second + 1);
    for (;;) {
      if (path == "/") path.clear();
      folders.push_back({root + path, second_version});
      if (path.empty()) break;
      path.resize(path.rfind('/'));
    }
  }
  return folders;
}

template <class T>
std::optional<T> read_number(const std::string& path) {
  T number{};
  std::ifstream file(path);
  return file >> number ? std::optional<T>(number) : std::nullopt;  // "max" is none
}

std::optional<uint64_t> least(const std::string& controller, const char* first_version, const char* second_version) {
  std::optional<uint64_t> limit;
  for (const Folder& folder : cgroup_folders(controller)) {
    const auto number = read_number<uint64_t>(folder.path + (folder.second_version ? second_version : first_version));
    if (number && *number < kUnlimited) limit = std::min(*number, limit.value_or(*number));
  }
  return limit;
}

std::optional<double> cpu_quota() {
  std::optional<double> limit;
  for (const Folder& folder : cgroup_folders("cpu")) {
    double quota = -1, period = 0;
    if (folder.second_version) {
      std::ifstream file(folder.path + "/cpu.max");
      if (!(file >> quota >> period)) continue;
    } else {
      quota = read_number<double>(folder.path + "/cpu.cfs_quota_us").value_or(-1);
      period = read_number<double>(folder.path + "/cpu.cfs_period_us").value_or(0);
    }
    if (quota > 0 && period > 0) limit = std::min(quota / period, limit.value_or(quota / period));
  }
  return limit;
}

}  // namespace

Cores cores() {
  Cores out;
  out.online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t set;
  out.affinity = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : out.online;
  out.quota = cpu_quota();
  const int whole = out.quota ? static_cast<int>(std::floor(*out.quota)) : out.affinity;
  out.usable = std::max(1, std::min(out.affinity, whole));
  return out;
}

std::optional<uint64_t> cgroup_memory_limit() { return least("memory", "/memory.limit_in_bytes", "/memory.max"); }
std::optional<uint64_t> cgroup_process_limit() { return least("pids", "/pids.max", "/pids.max"); }

int usable_gpus() {
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return 0;
  return c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->deviceCount();
}

uint64_t meminfo(const std::string& name) {
  std::ifstream file("/proc/meminfo");
  std::string word;
  uint64_t kib = 0;
  while (file >> word) {
    if (word == name + ":" && file >> kib) return kib * 1024;
  }
  return 0;
}

}  // namespace fsdp2::tool
