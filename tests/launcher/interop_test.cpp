// labels: ranks, peer
// timeout: 240
// needs: programs
// Ranks in Python and in C++ join the store that `fsdp2 run` hosts.

#include <fsdp2/process_group.h>
#include <gtest/gtest.h>

#include <ATen/Functions.h>

#include "launcher/launch.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

constexpr const char* kWorkerVariable = "FSDP2_TEST_IS_A_RANK";

// The body of a C++ rank: this executable, started again by `fsdp2 run`.
TEST(Interop, WorkerBody) {
  if (!getenv(kWorkerVariable)) GTEST_SKIP() << "only as a rank of CppRanksJoin";
  fsdp2::init_process_group();
  auto sum = at::full({1}, fsdp2::get_rank() + 1.0);
  fsdp2::all_reduce(sum);
  printf("sum %.1f of %d\n", sum.item<double>(), fsdp2::get_world_size());
  fsdp2::destroy_process_group();
}

TEST(Interop, CppRanksJoin) {
  auto self = std::filesystem::read_symlink("/proc/self/exe").string();
  Launch launch({"--nproc-per-node", "2", self, "--gtest_filter=Interop.WorkerBody"},
                {std::string(kWorkerVariable) + "=1", "GTEST_OUTPUT"});
  EXPECT_EQ(launch.wait(), 0) << launch.err() << launch.out();
  for (auto line : {"[rank 0] sum 3.0 of 2\n", "[rank 1] sum 3.0 of 2\n"}) {
    EXPECT_NE(launch.out().find(line), std::string::npos) << launch.out();
  }
}

TEST(Interop, PythonRanksJoin) {
  auto python = run_python(test_file("launcher/python_path.py"), {});
  ASSERT_EQ(python.exit_code, 0) << python.output;
  Launch launch({"--nproc-per-node", "2", test_file("launcher/gloo_worker.py"), "an argument"},
                {"PYTHON_EXEC=" + python.output.substr(0, python.output.find('\n'))});
  EXPECT_EQ(launch.wait(), 0) << launch.err();
  for (auto line : {"[rank 0] an argument: sum 3.0\n", "[rank 1] an argument: sum 3.0\n"}) {
    EXPECT_NE(launch.out().find(line), std::string::npos) << launch.out();
  }
}

}  // namespace
}  // namespace fsdp2::testing
