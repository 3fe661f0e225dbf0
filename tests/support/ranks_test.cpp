// labels: ranks
// The harness itself: what it reports when ranks fail, die or hang.

#include <fsdp2/process_group.h>

#include <csignal>
#include <fstream>
#include <thread>

#include <torch/torch.h>
#include <unistd.h>

#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

using namespace std::chrono_literals;

const RanksOptions kNoGroup{.timeout = 60s, .init_process_group = false};

RANKS_TEST(Ranks, HaveOneGroup, 3) {
  EXPECT_EQ(get_rank(), rank);
  EXPECT_EQ(get_world_size(), 3);
  torch::Tensor value = torch::full({2}, rank + 1.0);
  all_reduce(value);
  EXPECT_TRUE(torch::equal(value, torch::full({2}, 6.0)));
}

TEST(Ranks, AFailedExpectationOfOneRankFailsTheTestWithItsText) {
  const auto result = run_ranks(2, [](int rank) { EXPECT_EQ(rank, 0) << "only rank zero"; }, kNoGroup);
  ASSERT_FALSE(result);
  const std::string text = result.message();
  EXPECT_NE(text.find("[rank 0] passed"), std::string::npos) << text;
  EXPECT_NE(text.find("[rank 1] failed with exit code 1"), std::string::npos) << text;
  EXPECT_NE(text.find("[rank 1] only rank zero"), std::string::npos) << text;
}

TEST(Ranks, AnExceptionIsShown) {
  const auto result = run_ranks(1, [](int) { throw std::runtime_error("went wrong"); }, kNoGroup);
  ASSERT_FALSE(result);
  EXPECT_NE(std::string(result.message()).find("[rank 0] exception: went wrong"), std::string::npos);
}

TEST(Ranks, ADeadRankEndsTheOthers) {
  const auto start = std::chrono::steady_clock::now();
  const auto result = run_ranks(
      2,
      [](int rank) {
        if (rank == 1) ::raise(SIGKILL);
        std::this_thread::sleep_for(50s);
      },
      kNoGroup);
  ASSERT_FALSE(result);
  EXPECT_NE(std::string(result.message()).find("[rank 1] ended by Killed"), std::string::npos) << result.message();
  EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);
}

TEST(Ranks, LateRanksAreKilled) {
  const auto result =
      run_ranks(2, [](int) { std::this_thread::sleep_for(50s); }, {.timeout = 1s, .init_process_group = false});
  ASSERT_FALSE(result);
  EXPECT_NE(std::string(result.message()).find("killed after 1 s"), std::string::npos) << result.message();
}

TEST(Process, GivesExitCodeAndOutput) {
  const ProcessResult result = run_process({"sh", "-c", "echo out; echo err >&2; echo $FSDP2_VALUE; exit 3"},
                                           {"FSDP2_VALUE=some value"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.output, "out\nerr\nsome value\n");
}

TEST(Process, IsKilledWhenLate) {
  const ProcessResult result = run_process({"sleep", "50"}, {}, 1s);
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
}

TEST(Process, APythonOfTheLinkedReleaseIsThere) {
  TempDir folder;
  const std::string script = folder.path() + "/version.py";
  std::ofstream(script) << "import torch\nprint(torch.__version__.split('+')[0])\n";
  const ProcessResult result = run_python(script, {});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(result.output, TORCH_VERSION "\n");
}

TEST(Process, PythonRanksFindEachOther) {
  TempDir folder;
  const std::string script = folder.path() + "/ranks.py";
  std::ofstream(script) << "import torch, torch.distributed as dist\n"
                           "dist.init_process_group('gloo')\n"
                           "value = torch.ones(1)\n"
                           "dist.all_reduce(value)\n"
                           "assert value.item() == 2\n"
                           "dist.destroy_process_group()\n";
  const ProcessResult result = run_python_ranks(2, script, {});
  EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST(TempDir, IsRemovedWithItsContents) {
  std::string path;
  {
    TempDir folder;
    path = folder.path();
    std::ofstream(path + "/file") << "x";
    EXPECT_EQ(::access(path.c_str(), F_OK), 0);
  }
  EXPECT_NE(::access(path.c_str(), F_OK), 0);
}

}  // namespace
}  // namespace fsdp2::testing
