// Which backends init_process_group can use here.

#include <ATen/Version.h>
#include <sys/mman.h>
#include <unistd.h>

#include "doctor/host.h"
#include "doctor/topic.h"

namespace fsdp2::tool {
namespace {

#if FSDP2_HAS_NCCL
constexpr bool kHasNccl = true;
#else
constexpr bool kHasNccl = false;
#endif

bool memory_files_work() {
  const int fd = memfd_create("fsdp2-doctor", MFD_CLOEXEC);
  if (fd < 0) return false;
  const bool works = ftruncate(fd, 1 << 20) == 0;
  close(fd);
  return works;
}

}  // namespace

void check_backends(const DoctorOptions&, Topic& topic) {
  const bool shm = memory_files_work();
  const bool gloo = at::show_config().find("USE_GLOO=ON") != std::string::npos;
  const bool nccl = kHasNccl && usable_gpus() > 0;
  topic.fact("shm", shm, "shm", shm ? "yes; CPU tensors between ranks of one host" : "no");
  topic.fact("gloo", gloo, "gloo", gloo ? "yes; CPU tensors between hosts" : "no");
  topic.fact("nccl", nccl, "nccl",
             nccl       ? "yes; GPUs"
             : kHasNccl ? "built in, but there is no GPU"
                        : "no; libfsdp2 was built without it");
  topic.fact("fake", true, "fake", "yes; one rank of any job, for counting");
  if (!shm) {
    topic.find(Severity::kWarning, "no-shared-memory",
               "the system refuses memory files (memfd_create): ranks of one host use Gloo",
               "raise ulimit -f if it is set, or allow memfd_create in the sandbox (seccomp) of the container");
  }
  if (!kHasNccl && usable_gpus() > 0) {
    topic.find(
        Severity::kWarning, "no-nccl", "there are GPUs, and libfsdp2 was built without NCCL",
        "configure libfsdp2 with a libtorch whose environment has nccl.h; the output of cmake says what is missing");
  }
}

}  // namespace fsdp2::tool
