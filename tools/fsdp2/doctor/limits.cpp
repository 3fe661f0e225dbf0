// What the system allows a process: files, processes, locked and virtual memory.

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>

#include "checkpoint/text.h"
#include "doctor/host.h"
#include "doctor/topic.h"

namespace fsdp2::tool {
namespace {

struct Limit {
  rlim_t soft = RLIM_INFINITY, hard = RLIM_INFINITY;
};

Limit limit_of(int resource) {
  rlimit value{};
  if (getrlimit(static_cast<__rlimit_resource_t>(resource), &value) != 0) return {};
  return {value.rlim_cur, value.rlim_max};
}

Json json(rlim_t value) { return value == RLIM_INFINITY ? Json(nullptr) : Json(value); }

std::string text(rlim_t value, bool bytes) {
  if (value == RLIM_INFINITY) return "unlimited";
  return bytes ? bytes_text(value) : std::to_string(value);
}

Limit show(Topic& topic, const std::string& key, int resource, const std::string& label, bool bytes) {
  const Limit limit = limit_of(resource);
  topic.fact(
      key, {{"soft", json(limit.soft)}, {"hard", json(limit.hard)}}, label,
      text(limit.soft, bytes) + (limit.hard == limit.soft ? "" : ", can be raised to " + text(limit.hard, bytes)));
  return limit;
}

std::string how_to_raise(const std::string& option, const Limit& limit, uint64_t wanted) {
  const std::string command = "ulimit -" + option + " " + std::to_string(wanted);
  if (limit.hard >= wanted) return command + " before starting the job";
  return command + " as root, or in /etc/security/limits.conf, the unit of the service or the container's --ulimit";
}

bool has_infiniband() {
  std::error_code error;
  return std::filesystem::directory_iterator("/sys/class/infiniband", error) != std::filesystem::directory_iterator();
}

}  // namespace

void check_limits(const DoctorOptions& options, Topic& topic) {
  const auto ranks = static_cast<uint64_t>(options.num_ranks);

  // A rank has a few connections with each other one in every group, the launcher a few with each rank.
  const uint64_t files = 256 + 16 * ranks;
  const Limit open_files = show(topic, "open_files", RLIMIT_NOFILE, "open files", false);
  if (open_files.soft < files) {
    topic.find(Severity::kWarning, "open-files",
               "a process may open " + text(open_files.soft, false) + " files (ulimit -n); " + std::to_string(ranks) +
                   " ranks with a few groups and checkpoints need some " + std::to_string(files),
               how_to_raise("n", open_files, std::max<uint64_t>(4096, files)));
  }

  const uint64_t threads = 256 + ranks * (16 + static_cast<uint64_t>(cores().usable));
  const Limit processes = show(topic, "processes", RLIMIT_NPROC, "processes", false);
  const auto group = cgroup_process_limit();
  topic.fact("processes_of_group", group ? Json(*group) : Json(nullptr));
  if (processes.soft < threads) {
    topic.find(Severity::kWarning, "processes",
               "this user may have " + text(processes.soft, false) + " processes and threads (ulimit -u); " +
                   std::to_string(ranks) + " ranks take some " + std::to_string(threads),
               how_to_raise("u", processes, std::max<uint64_t>(4096, threads)));
  }
  if (group && *group < threads) {
    topic.find(Severity::kWarning, "processes-of-group",
               "the control group may have " + std::to_string(*group) + " processes and threads; " +
                   std::to_string(ranks) + " ranks take some " + std::to_string(threads),
               "raise pids.max (docker run --pids-limit, TasksMax of the service)");
  }

  const Limit locked = show(topic, "locked_memory", RLIMIT_MEMLOCK, "locked memory", true);
  if (has_infiniband() && locked.soft != RLIM_INFINITY) {
    topic.find(
        Severity::kWarning, "locked-memory",
        "there is InfiniBand, and a process may lock " + text(locked.soft, true) + " (ulimit -l): NCCL cannot use it",
        "ulimit -l unlimited as root, or memlock in /etc/security/limits.conf, docker run --ulimit memlock=-1");
  }
  const Limit virtual_memory = show(topic, "virtual_memory", RLIMIT_AS, "virtual memory", true);
  if (virtual_memory.soft != RLIM_INFINITY) {
    topic.find(Severity::kWarning, "virtual-memory",
               "virtual memory is limited to " + text(virtual_memory.soft, true) +
                   " (ulimit -v): addresses are reserved far beyond what is used",
               "ulimit -v unlimited; limit memory by a control group instead");
  }
  const Limit file_size = show(topic, "file_size", RLIMIT_FSIZE, "file size", true);
  if (file_size.soft != RLIM_INFINITY) {
    topic.find(Severity::kWarning, "file-size",
               "files are limited to " + text(file_size.soft, true) +
                   " (ulimit -f), shared memory of ranks and checkpoints too",
               "ulimit -f unlimited");
  }
}

}  // namespace fsdp2::tool
