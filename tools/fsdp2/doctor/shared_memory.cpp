// Memory that ranks of one host share.

#include <sys/resource.h>
#include <sys/statvfs.h>

#include <algorithm>

#include "checkpoint/text.h"
#include "doctor/host.h"
#include "doctor/topic.h"

namespace fsdp2::tool {
namespace {

constexpr uint64_t kSmall = uint64_t{1} << 30;

}  // namespace

void check_shared_memory(const DoctorOptions&, Topic& topic) {
  // memfd: pages of this process, bounded by memory and its limits, not by the size of /dev/shm.
  const auto limit = cgroup_memory_limit();
  const uint64_t available = meminfo("MemAvailable");
  const uint64_t bound = limit ? std::min(*limit, available) : available;
  topic.fact("shm_backend_bound", bound, "backend shm", "up to " + bytes_text(bound) + " (memfd, not /dev/shm)");

  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) != 0) {
    topic.fact("dev_shm", nullptr, "/dev/shm", "not there");
    topic.find(Severity::kNote, "dev-shm", "/dev/shm is not there: NCCL and the data loaders of Python ranks use it",
               "mount -t tmpfs tmpfs /dev/shm");
    return;
  }
  const uint64_t total = uint64_t{shm.f_blocks} * shm.f_frsize, free_bytes = uint64_t{shm.f_bavail} * shm.f_frsize;
  topic.fact("dev_shm", {{"total", total}, {"free", free_bytes}}, "/dev/shm",
             bytes_text(free_bytes) + " free of " + bytes_text(total));
  if (free_bytes < kSmall) {
    topic.find(usable_gpus() > 0 ? Severity::kWarning : Severity::kNote, "dev-shm",
               "/dev/shm has " + bytes_text(free_bytes) + " free of " + bytes_text(total) +
                   ": little for NCCL and for the data loaders of Python ranks (backend shm does not use it)",
               "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm; remove old files there");
  }
}

}  // namespace fsdp2::tool
