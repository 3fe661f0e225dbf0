// labels: ranks
// timeout: 240
// needs: programs
// Nothing that `fsdp2 run` started is alive 5 s after a rank's failure, or a SIGTERM or SIGKILL of
// the launcher.

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <thread>

#include "launcher/launch.h"

namespace fsdp2::testing {
namespace {

// Rank 0 ignores SIGTERM. Rank 1 starts a daemon in a session of its own, its output closed, that
// ignores SIGTERM as well, and one whose parent is gone.
constexpr const char* kStubborn =
    "echo TORCHELASTIC_RUN_ID=$TORCHELASTIC_RUN_ID;"
    "if [ $RANK = 0 ]; then trap '' TERM HUP INT; else"
    "  setsid sh -c \"trap '' TERM HUP; while :; do sleep 0.2; done\" </dev/null >/dev/null 2>&1 & "
    "  (setsid sleep 300 </dev/null >/dev/null 2>&1 &) ; fi;"
    "echo ready; while :; do sleep 0.2; done";

struct Stubborn {
  Launch launch;
  std::string run_id;
  explicit Stubborn(const std::string& command = kStubborn) : launch(shell({"--nproc-per-node", "2"}, command)) {
    EXPECT_TRUE(launch.wait_for_output("[rank 0] ready") && launch.wait_for_output("[rank 1] ready"))
        << launch.out() << launch.err();
    run_id = value_of(launch.out(), "TORCHELASTIC_RUN_ID");
    EXPECT_GE(run_id.size(), 16u);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_GE(processes_with(run_id).size(), 4u);
  }
};

TEST(Cleanup, AfterSigtermOfTheLauncher) {
  Stubborn job;
  kill(job.launch.pid(), SIGTERM);
  EXPECT_TRUE(none_left(job.run_id, 5.0));
  EXPECT_EQ(job.launch.wait(), 143) << job.launch.err();  // rank 1 ended by the forwarded SIGTERM
}

TEST(Cleanup, AfterSigkillOfTheLauncher) {
  Stubborn job;
  kill(job.launch.pid(), SIGKILL);
  EXPECT_TRUE(none_left(job.run_id, 5.0));
  EXPECT_EQ(job.launch.wait(), 137);
}

TEST(Cleanup, AfterARanksFailure) {
  std::string command = kStubborn;
  auto loop = command.find("echo ready;");
  command.insert(loop + 11, "if [ $RANK = 1 ]; then sleep 1; exit 4; fi;");
  Stubborn job(command);
  ASSERT_TRUE(job.launch.wait_for_output("rank 1 ended with code 4"));
  EXPECT_TRUE(none_left(job.run_id, 5.0));
  EXPECT_EQ(job.launch.wait(), 4) << job.launch.err();
}

TEST(Cleanup, DaemonsDoNotOutliveASuccessfulRun) {
  Launch launch(
      shell({"--nproc-per-node", "1"}, "echo TORCHELASTIC_RUN_ID=$TORCHELASTIC_RUN_ID; (setsid sleep 300 &); exit 0"));
  EXPECT_EQ(launch.wait(), 0);  // although the daemon held its output open
  EXPECT_TRUE(processes_with(value_of(launch.out(), "TORCHELASTIC_RUN_ID")).empty());
}

TEST(Cleanup, ARunWithinARunEndsWithIt) {
  Launch outer({"--nproc-per-node", "1", fsdp2_program(), "run", "--nproc-per-node", "1", "sh", "-c",
                "echo TORCHELASTIC_RUN_ID=$TORCHELASTIC_RUN_ID; (setsid sleep 300 >/dev/null 2>&1 "
                "&); echo ready;"
                "sleep 300"});
  ASSERT_TRUE(outer.wait_for_output("ready")) << outer.err();
  auto inner_id = value_of(outer.out(), "TORCHELASTIC_RUN_ID");
  EXPECT_FALSE(processes_with(inner_id).empty());
  kill(outer.pid(), SIGKILL);
  EXPECT_TRUE(none_left(inner_id, 5.0));
}

TEST(Cleanup, AReaderThatStopsReadingDoesNotDelayTheEnd) {
  Launch launch(shell({"--nproc-per-node", "1"},
                      "echo TORCHELASTIC_RUN_ID=$TORCHELASTIC_RUN_ID; echo ready;"
                      "while :; do echo a line of text that nobody reads; done"));
  ASSERT_TRUE(launch.wait_for_output("ready\n"));
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the pipe is full now
  kill(launch.pid(), SIGTERM);
  EXPECT_TRUE(none_left(value_of(launch.out(), "TORCHELASTIC_RUN_ID"), 5.0));  // reads nothing
  EXPECT_EQ(launch.wait(), 143);
}

TEST(Cleanup, SignalsReachTheRanksAndTheirCodeCounts) {
  Launch launch(
      shell({"--nproc-per-node", "2"}, "trap 'echo saved; exit 0' INT; echo ready; while :; do sleep 0.1; done"));
  ASSERT_TRUE(launch.wait_for_output("[rank 0] ready") && launch.wait_for_output("[rank 1] ready"));
  kill(launch.pid(), SIGINT);
  EXPECT_EQ(launch.wait(), 0) << launch.err();
  EXPECT_NE(launch.out().find("[rank 0] saved"), std::string::npos);
  EXPECT_NE(launch.out().find("[rank 1] saved"), std::string::npos);
}

}  // namespace
}  // namespace fsdp2::testing
