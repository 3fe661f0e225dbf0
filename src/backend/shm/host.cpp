#include "backend/shm/host.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>

#include <c10/util/StringUtil.h>

namespace fsdp2::detail::shm {

std::string host_identity() {
  struct stat net {};
  ::stat("/proc/self/ns/net", &net);
  if (const char* given = std::getenv("FSDP2_HOST_ID"); given != nullptr && given[0] != '\0') {
    return c10::str(given, "/", net.st_ino);
  }
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return c10::str(name.data(), "/", boot, "/", net.st_ino);
}

}  // namespace fsdp2::detail::shm
