// labels: ranks
// needs: programs, check_device
// The program behind scripts/check_gpu.sh, on the CPU and 2 ranks; without a GPU both say so.

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "launcher/launch.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

const std::vector<std::string> kSmall = {"--dim",      "32", "--layers", "2",  "--heads", "2",
                                         "--kv-heads", "1",  "--ffn",    "64", "--vocab", "64",
                                         "--seq",      "16", "--batch",  "1",  "--steps", "3"};

std::string program() { return build_folder() + "/bin/check_device"; }

TEST(CheckDevice, PassesOnTwoRanksOfTheCPU) {
  const TempDir folder;
  const std::string json = folder.path() + "/report.json";
  std::vector<std::string> arguments{"--standalone", "--nproc-per-node", "2", program(), "--device",
                                     "cpu",          "--json",           json};
  arguments.insert(arguments.end(), kSmall.begin(), kSmall.end());
  Launch launch(arguments);
  EXPECT_EQ(launch.wait(100), 0) << launch.out() << launch.err();
  const auto report = nlohmann::json::parse(read_file(json));
  EXPECT_EQ(report.at("world_size"), 2);
  EXPECT_EQ(report.at("failed"), 0);
  std::set<std::string> passed;
  for (const auto& check : report.at("checks")) {
    if (check.at("result") == "ok") passed.insert(check.at("check"));
  }
  for (const char* name : {"losses", "kept after forward", "prefetch two ahead", "mixed precision", "CPU offload",
                           "fused AdamW", "fused SGD", "clipped norm", "counters", "checkpoint", "async checkpoint"}) {
    EXPECT_TRUE(passed.contains(name)) << name;
  }
}

TEST(CheckDevice, OneProcessNeedsNoLauncher) {
  std::vector<std::string> arguments{program(), "--device", "cpu"};
  arguments.insert(arguments.end(), kSmall.begin(), kSmall.end());
  const ProcessResult result = run_process(arguments);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_NE(result.output.find("all passed on cpu"), std::string::npos) << result.output;
}

TEST(CheckDevice, SaysThatThereIsNoGPU) {
  if (std::filesystem::exists("/dev/nvidiactl")) GTEST_SKIP() << "there is one here";
  const ProcessResult direct = run_process({program()});
  EXPECT_EQ(direct.exit_code, 3);
  EXPECT_NE(direct.output.find("there is no GPU here"), std::string::npos) << direct.output;
  const ProcessResult script = run_process({test_file("../scripts/check_gpu.sh")});
  EXPECT_EQ(script.exit_code, 3);
  EXPECT_NE(script.output.find("no GPU on this machine"), std::string::npos) << script.output;
}

}  // namespace
}  // namespace fsdp2::testing
