#pragma once

#include <ATen/core/Generator.h>

#include <string>

#include <fsdp2/device_mesh.h>

namespace fsdp2::detail {

/// kUsage naming the ranks of `mesh` whose generator is in another state than the first rank's. Collective.
void check_generators_agree(at::Generator generator, const DeviceMesh& mesh, const std::string& what);

}  // namespace fsdp2::detail
