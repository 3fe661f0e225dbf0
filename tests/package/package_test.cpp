// labels: package
// timeout: 900
// processors: 2
// The installed package: from a temporary prefix, moved, used by a project that knows nothing else of this tree.

#include <filesystem>
#include <fstream>

#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

std::string source(const std::string& relative) { return test_file("../" + relative); }

class Package : public ::testing::Test {
 protected:
  // Installs into one folder and moves it, so that nothing can depend on where it was.
  static void SetUpTestSuite() {
    folder_ = new TempDir;
    const std::string first = folder_->path() + "/first";
    installed_ = run_process({"cmake", "--install", build_folder(), "--prefix", first});
    if (installed_.exit_code == 0) fs::rename(first, prefix());
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }

  void SetUp() override { ASSERT_EQ(installed_.exit_code, 0) << installed_.output; }

  static std::string prefix() { return folder_->path() + "/prefix"; }
  static std::string scratch(const std::string& name) { return folder_->path() + "/" + name; }

  static ProcessResult configure(const std::string& project, const std::string& build,
                                 const std::string& torch_root = {}) {
    std::vector<std::string> argv = {"cmake", "-G", "Ninja", "-S", project, "-B", build,
                                     "-DCMAKE_PREFIX_PATH=" + prefix()};
    if (!torch_root.empty()) argv.push_back("-DTORCH_ROOT=" + torch_root);
    return run_process(argv, {"TORCH_ROOT="});
  }

  static TempDir* folder_;
  static ProcessResult installed_;
};

TempDir* Package::folder_ = nullptr;
ProcessResult Package::installed_;

TEST_F(Package, AConsumerBuildsAndRuns) {
  const std::string build = scratch("consumer");
  const ProcessResult configured = configure(source("examples/consumer"), build);
  ASSERT_EQ(configured.exit_code, 0) << configured.output;
  const ProcessResult built = run_process({"cmake", "--build", build}, {}, 600s);
  ASSERT_EQ(built.exit_code, 0) << built.output;
  const ProcessResult ran =
      run_process({prefix() + "/bin/fsdp2", "run", "--standalone", "--nproc-per-node", "2", build + "/consumer"});
  EXPECT_EQ(ran.exit_code, 0) << ran.output;
  EXPECT_NE(ran.output.find("ranks: 2, loss fell: true"), std::string::npos) << ran.output;
}

TEST_F(Package, AnotherLibtorchIsAnError) {
  // A libtorch of another version, as far as the package looks at it.
  const std::string other = scratch("other_torch");
  fs::create_directories(other + "/include/ATen/core");
  fs::create_directories(other + "/include/torch/headeronly");
  fs::create_directories(other + "/lib");
  std::ofstream(other + "/include/ATen/core/Tensor.h") << "";
  std::ofstream(other + "/include/torch/headeronly/version.h")
      << "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 9\n#define TORCH_VERSION_PATCH 1\n";
  for (const char* name : {"libtorch.so", "libtorch_cpu.so", "libc10.so"}) std::ofstream(other + "/lib/" + name) << "";

  const ProcessResult result = configure(source("examples/consumer"), scratch("other_build"), other);
  EXPECT_NE(result.exit_code, 0);
  EXPECT_NE(result.output.find("but libtorch 2.9.1"), std::string::npos) << result.output;
}

TEST_F(Package, OnlyPublicHeadersAreInstalled) {
  for (const auto& entry : fs::recursive_directory_iterator(prefix() + "/include")) {
    if (!entry.is_regular_file()) continue;
    const std::string relative = fs::relative(entry.path(), prefix() + "/include").string();
    EXPECT_TRUE(fs::exists(source("include/" + relative))) << relative;
  }
}

TEST_F(Package, HeadersAreSelfContained) {
  const std::string project = scratch("headers_project");
  fs::create_directories(project);
  std::ofstream lists(project + "/CMakeLists.txt");
  lists << "cmake_minimum_required(VERSION 3.25)\nproject(headers LANGUAGES CXX)\nfind_package(fsdp2 REQUIRED)\n"
           "add_library(headers OBJECT)\ntarget_link_libraries(headers PRIVATE fsdp2::fsdp2)\n"
           "target_compile_options(headers PRIVATE -fsyntax-only -Wall -Wextra -Werror)\n";
  int count = 0;
  for (const auto& entry : fs::recursive_directory_iterator(prefix() + "/include")) {
    if (!entry.is_regular_file()) continue;
    const std::string file = "header_" + std::to_string(count++) + ".cpp";
    std::ofstream(project + "/" + file)
        << "#include <" << fs::relative(entry.path(), prefix() + "/include").string() << ">\n";
    lists << "target_sources(headers PRIVATE " << file << ")\n";
  }
  lists.close();
  ASSERT_GT(count, 0);
  const std::string build = scratch("headers_build");
  const ProcessResult configured = configure(project, build);
  ASSERT_EQ(configured.exit_code, 0) << configured.output;
  const ProcessResult built = run_process({"cmake", "--build", build, "--", "-k", "0", "-j", "2"}, {}, 800s);
  EXPECT_EQ(built.exit_code, 0) << built.output;
}

}  // namespace
}  // namespace fsdp2::testing
