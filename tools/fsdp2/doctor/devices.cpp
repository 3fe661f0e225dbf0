// Processors, memory and GPUs.

#include <cstdio>
#include <filesystem>

#include "checkpoint/text.h"
#include "doctor/host.h"
#include "doctor/topic.h"

namespace fsdp2::tool {
namespace {

constexpr uint64_t kBytesPerRank = uint64_t{512} << 20;  // of a small program; libtorch alone takes half of it

/// By the files of the driver, also where libtorch cannot use them.
int nvidia_gpus() {
  int count = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", ignored)) {
    const std::string name = entry.path().filename().string();
    count +=
        name.rfind("nvidia", 0) == 0 && name.size() > 6 && name.find_first_not_of("0123456789", 6) == std::string::npos;
  }
  return count;
}

void check_cores(int num_ranks, Topic& topic) {
  const Cores seen = cores();
  std::string text = std::to_string(seen.usable) + " usable of " + std::to_string(seen.online);
  if (seen.affinity < seen.online) text += ", affinity " + std::to_string(seen.affinity);
  if (seen.quota) {
    char quota[32];
    std::snprintf(quota, sizeof(quota), ", quota %.4g", *seen.quota);
    text += quota;
  }
  topic.fact("cores_online", seen.online);
  topic.fact("cores_affinity", seen.affinity);
  topic.fact("cores_quota", seen.quota ? Json(*seen.quota) : Json(nullptr));
  topic.fact("cores_usable", seen.usable, "cores", text);
  if (num_ranks > seen.usable) {
    topic.find(
        Severity::kWarning, "too-few-cores",
        std::to_string(num_ranks) + " ranks share " + count_text(static_cast<size_t>(seen.usable), "usable core") +
            " (of " + std::to_string(seen.online) + "): they wait for each other in every collective",
        "start at most " + std::to_string(seen.usable) +
            " ranks, or raise the affinity (taskset, --cpus-per-task of srun) or the CPU quota of the container");
  }
}

void check_memory(int num_ranks, Topic& topic) {
  const uint64_t total = meminfo("MemTotal"), available = meminfo("MemAvailable");
  const auto limit = cgroup_memory_limit();
  const bool limited = limit && *limit < total;
  topic.fact("memory_total", total);
  topic.fact("memory_limit", limited ? Json(*limit) : Json(nullptr));
  topic.fact("memory_available", available, "memory",
             bytes_text(available) + " available of " + bytes_text(total) +
                 (limited ? ", control group limit " + bytes_text(*limit) : ""));
  const uint64_t usable = limited ? std::min(*limit, available) : available;
  const uint64_t wanted = kBytesPerRank * static_cast<uint64_t>(num_ranks);
  if (usable < wanted) {
    topic.find(Severity::kWarning, "little-memory",
               bytes_text(usable) + " of memory for " + count_text(static_cast<size_t>(num_ranks), "rank") + "; " +
                   bytes_text(wanted) + " is little already",
               "start fewer ranks, end other programs, or raise the memory limit of the container");
  }
}

void check_gpus(int num_ranks, Topic& topic) {
  const int usable = usable_gpus(), present = nvidia_gpus();
  topic.fact("gpus_present", present);
  topic.fact("gpus_usable", usable, "GPUs",
             usable == 0 && present == 0 ? "none" : std::to_string(usable) + " usable of " + std::to_string(present));
  if (present > 0 && usable == 0) {
    topic.find(
        Severity::kWarning, "gpus-unusable",
        "the driver shows " + count_text(static_cast<size_t>(present), "GPU") + ", libtorch can use none",
        "use a libtorch with CUDA, one that is not newer than the driver allows, and look at CUDA_VISIBLE_DEVICES");
  }
  if (usable > 0 && num_ranks > usable) {
    topic.find(Severity::kWarning, "too-few-gpus",
               std::to_string(num_ranks) + " ranks for " + count_text(static_cast<size_t>(usable), "GPU") +
                   ": NCCL refuses two ranks on one",
               "start " + count_text(static_cast<size_t>(usable), "rank") + ": fsdp2 run --nproc-per-node gpu");
  }
}

}  // namespace

void check_devices(const DoctorOptions& options, Topic& topic) {
  check_cores(options.num_ranks, topic);
  check_memory(options.num_ranks, topic);
  check_gpus(options.num_ranks, topic);
}

}  // namespace fsdp2::tool
