#include "signal_names.h"

#include <signal.h>
#include <string.h>

namespace fsdp2::tool {

std::string signal_name(int signal_number) {
  const char* name = sigabbrev_np(signal_number);
  return name ? "SIG" + std::string(name) : "signal " + std::to_string(signal_number);
}

int signal_from_name(const std::string& name) {
  for (int candidate = 1; candidate < NSIG; ++candidate) {
    if (signal_name(candidate) == name) return candidate;
  }
  return 0;
}

}  // namespace fsdp2::tool
