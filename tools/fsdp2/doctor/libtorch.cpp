// Which libtorch this is, and whether it is the one that libfsdp2 was built with.

#include <ATen/Version.h>
#include <dlfcn.h>
#include <torch/version.h>

#include <filesystem>

#include "doctor/topic.h"

namespace fsdp2::tool {
namespace {

/// What stands after `before` in libtorch's own description, up to one of `ends`.
std::string part_of(const std::string& config, const std::string& before, const char* ends) {
  const size_t at = config.find(before);
  if (at == std::string::npos) return "";
  const size_t begin = at + before.size();
  return config.substr(begin, config.find_first_of(ends, begin) - begin);
}

}  // namespace

void check_libtorch(const DoctorOptions&, Topic& topic) {
  const std::string config = at::show_config();
  const auto setting = [&](const std::string& name) { return part_of(config, " " + name + "=", ",\n"); };
  const auto has = [&](const std::string& name) {
    const std::string value = setting(name);
    return value == "ON" || value == "1";
  };

  const std::string built = TORCH_VERSION, runs = setting("TORCH_VERSION");
  topic.fact("version", runs, "version", runs);
  topic.fact("built_with", built);
  if (runs != built) {
    topic.find(Severity::kError, "libtorch-mismatch",
               "libfsdp2 was built with libtorch " + built + " and runs with " + runs,
               "build libfsdp2 with the libtorch that is used, or put the other one on LD_LIBRARY_PATH");
  }

  Dl_info library{};
  if (dladdr(reinterpret_cast<void*>(&at::show_config), &library) != 0 && library.dli_fname != nullptr) {
    std::error_code ignored;
    const std::string path = std::filesystem::canonical(library.dli_fname, ignored).string();
    topic.fact("library", path, "library", path);
  }

  const std::string compiler = part_of(config, "\n  - ", "\n");
  const bool cxx11 = _GLIBCXX_USE_CXX11_ABI != 0;
  topic.fact("compiler", compiler);
  topic.fact("build", setting("BUILD_TYPE"));
  topic.fact("cxx11_abi", cxx11, "build",
             setting("BUILD_TYPE") + ", " + compiler + ", " + (cxx11 ? "C++11 ABI" : "ABI from before C++11"));
  const std::string cuda = has("USE_CUDA") ? setting("CUDA_VERSION") : "";
  topic.fact("cuda", cuda.empty() ? Json(nullptr) : Json(cuda));
  topic.fact("nccl", has("USE_NCCL"));
  topic.fact("gloo", has("USE_GLOO"));
  topic.fact("mpi", has("USE_MPI"), "made with",
             (cuda.empty() ? "no CUDA" : "CUDA " + cuda) + (has("USE_NCCL") ? ", NCCL" : ", no NCCL") +
                 (has("USE_GLOO") ? ", Gloo" : ", no Gloo") + (has("USE_MKL") ? ", MKL" : ""));
  const std::string instructions = part_of(config, "CPU capability usage: ", "\n");
  topic.fact("cpu_capability", instructions, "instructions", instructions);
  if (!has("USE_GLOO")) {
    topic.find(Severity::kError, "no-gloo", "this libtorch was made without Gloo, which ranks on several hosts need",
               "use a libtorch with USE_GLOO=ON, as the published ones are");
  }
}

}  // namespace fsdp2::tool
