#pragma once

#include <string>

namespace fsdp2::detail::shm {

/// Equal for processes that can share memory: the host (its running kernel, its name) and the network namespace, in
/// which they find each other. FSDP2_HOST_ID takes the place of the host where it is set.
std::string host_identity();

}  // namespace fsdp2::detail::shm
