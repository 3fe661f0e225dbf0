#pragma once

#include <string>

namespace fsdp2::tool {

/// 15 -> "SIGTERM"; "signal 40" where there is no name.
std::string signal_name(int signal_number);
/// "SIGTERM" -> 15; 0 where there is no such name.
int signal_from_name(const std::string& name);

}  // namespace fsdp2::tool
