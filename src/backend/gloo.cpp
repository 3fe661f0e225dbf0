// The only user of gloo_opaque/: libtorch carries Gloo's code but not its headers, and what
// ProcessGroupGloo.hpp needs of them is a handful of declarations. Gloo types are never made or derived from here.

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>

#include "backend/backend.h"

namespace fsdp2::detail::gloo_backend {

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request) {
  auto options = c10d::ProcessGroupGloo::Options::create(request.timeout);
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (interface != nullptr && interface[0] != '\0') {
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(interface));
  } else if (request.single_host) {
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  } else {
    options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  }
  return c10::make_intrusive<c10d::ProcessGroupGloo>(request.store, request.rank, request.world_size, options);
}

}  // namespace fsdp2::detail::gloo_backend
