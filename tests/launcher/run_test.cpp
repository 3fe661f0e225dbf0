// labels: ranks
// timeout: 480
// needs: programs
// `fsdp2 run`: exit codes, output, environment, errors.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>

#include "launcher/launch.h"

namespace fsdp2::testing {
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Run, SuccessIsZeroAndEveryRankRuns) {
  Launch launch(shell({"--nproc-per-node", "3"}, "echo I am $RANK of $WORLD_SIZE"));
  EXPECT_EQ(launch.wait(), 0);
  for (auto line : {"[rank 0] I am 0 of 3\n", "[rank 1] I am 1 of 3\n", "[rank 2] I am 2 of 3\n"}) {
    EXPECT_TRUE(contains(launch.out(), line)) << launch.out();
  }
}

TEST(Run, ExitsWithTheCodeOfTheRankThatFailedFirst) {
  // Rank 0 fails as a consequence, with another code, when it is told to stop.
  Launch launch(shell({"--nproc-per-node", "2"},
                      "if [ $RANK = 1 ]; then sleep 0.3; echo bad weights >&2; exit 3; fi;"
                      "trap 'echo peer lost >&2; exit 7' TERM; for i in $(seq 200); do sleep 0.1; done"));
  EXPECT_EQ(launch.wait(), 3);
  auto lines = launch.err_lines();
  ASSERT_GE(lines.size(), 4u);
  EXPECT_TRUE(contains(lines.back(), "root cause: rank 1")) << launch.err();
  EXPECT_TRUE(contains(lines.back(), "code 3")) << launch.err();
  EXPECT_TRUE(contains(lines.back(), "bad weights")) << launch.err();
  // The table: rank 1's row is the last one, after rank 0's.
  EXPECT_TRUE(lines[lines.size() - 2].starts_with("  1 ")) << launch.err();
  EXPECT_TRUE(lines[lines.size() - 3].starts_with("  0 ")) << launch.err();
  EXPECT_TRUE(contains(lines[lines.size() - 3], "code 7 (stopped)")) << launch.err();
}

TEST(Run, ASignalIs128PlusItsNumber) {
  Launch launch(shell({"--nproc-per-node", "2"}, "[ $RANK = 0 ] && kill -SEGV $$; sleep 30"));
  EXPECT_EQ(launch.wait(), 139);
  EXPECT_TRUE(contains(launch.err_lines().back(), "SIGSEGV")) << launch.err();
}

TEST(Run, TheErrorFileOfARankExplainsTheRootCause) {
  Launch launch(shell({"--nproc-per-node", "1"},
                      "echo '{\"message\": {\"message\": \"ValueError: shapes differ\", \"extraInfo\": "
                      "{\"timestamp\": \"17\"}}}' > $TORCHELASTIC_ERROR_FILE; exit 5"));
  EXPECT_EQ(launch.wait(), 5);
  EXPECT_TRUE(contains(launch.err_lines().back(), "ValueError: shapes differ")) << launch.err();
}

TEST(Run, LinesOfRanksAreNeverMixed) {
  // Each rank writes its line in pieces; the pieces of the others come in between.
  Launch launch(shell({"--nproc-per-node", "3"},
                      "for i in 1 2 3 4 5 6 7 8 9 10; do printf $RANK; sleep 0.01; printf $RANK; sleep 0.01; "
                      "printf '%s\\n' $RANK; done; printf 'no newline at the end'"));
  EXPECT_EQ(launch.wait(), 0);
  std::istringstream stream(launch.out());
  std::map<std::string, int> count;
  for (std::string line; std::getline(stream, line);) ++count[line];
  std::map<std::string, int> expected;
  for (std::string rank : {"0", "1", "2"}) {
    expected["[rank " + rank + "] " + rank + rank + rank] = 10;
    expected["[rank " + rank + "] no newline at the end"] = 1;
  }
  EXPECT_EQ(count, expected);
}

TEST(Run, PrefixAndFilterOptions) {
  Launch plain(shell({"--nproc-per-node", "1", "--no-prefix"}, "echo as it is"));
  EXPECT_EQ(plain.wait(), 0);
  EXPECT_EQ(plain.out(), "as it is\n");
  Launch filtered(shell({"--nproc-per-node", "3", "--local_ranks_filter=1"}, "echo rank $RANK"));
  EXPECT_EQ(filtered.wait(), 0);
  EXPECT_EQ(filtered.out(), "[rank 1] rank 1\n");
  Launch templated(shell({"--nproc-per-node", "1"}, "echo x"),
                   {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=<${role_name}/${local_rank}> "});
  EXPECT_EQ(templated.wait(), 0);
  EXPECT_EQ(templated.out(), "<default/0> x\n");
}

TEST(Run, TeeAndRedirectWriteFiles) {
  char folder[] = "/tmp/fsdp2-run-test-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  Launch launch(shell({"--nproc-per-node", "2", "--log-dir", folder, "-r", "0:1", "--tee", "1:3"},
                      "echo out $RANK; echo err $RANK >&2"));
  EXPECT_EQ(launch.wait(), 0);
  EXPECT_EQ(launch.out(), "[rank 1] out 1\n");
  EXPECT_TRUE(contains(launch.err(), "[rank 0] err 0\n"));
  EXPECT_TRUE(contains(launch.err(), "[rank 1] err 1\n"));
  std::string command = std::string("cat ") + folder + "/*/attempt_0/*/std*.log | sort | tr '\\n' ,; rm -r " + folder;
  FILE* pipe = popen(command.c_str(), "r");
  char text[256] = {};
  auto size = fread(text, 1, sizeof(text) - 1, pipe);
  pclose(pipe);
  EXPECT_EQ(std::string(text, size), "err 1,out 0,out 1,");
}

// The names are what torchrun of torch 2.13 sets for its workers (recorded from its workers'
// environment).
TEST(Run, SetsTorchrunsEnvironment) {
  Launch launch(
      shell({"--nproc-per-node", "2", "--no-prefix", "--local-ranks-filter", "1", "--role", "trainer"}, "env"),
      {"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"});
  EXPECT_EQ(launch.wait(), 0);
  std::map<std::string, std::string> expected = {{"RANK", "1"},
                                                 {"LOCAL_RANK", "1"},
                                                 {"WORLD_SIZE", "2"},
                                                 {"LOCAL_WORLD_SIZE", "2"},
                                                 {"GROUP_RANK", "0"},
                                                 {"GROUP_WORLD_SIZE", "1"},
                                                 {"ROLE_RANK", "1"},
                                                 {"ROLE_NAME", "trainer"},
                                                 {"ROLE_WORLD_SIZE", "2"},
                                                 {"TORCHELASTIC_RESTART_COUNT", "0"},
                                                 {"TORCHELASTIC_MAX_RESTARTS", "0"},
                                                 {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                 {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
                                                 {"OMP_NUM_THREADS", "1"},
                                                 {"TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"}};
  for (const auto& [name, value] : expected) EXPECT_EQ(value_of("\n" + launch.out(), "\n" + name), value) << name;
  for (auto name : {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}) {
    EXPECT_NE(value_of("\n" + launch.out(), std::string("\n") + name), "") << name;
  }
  EXPECT_TRUE(contains(launch.err(), "OMP_NUM_THREADS is not set"));
}

TEST(Run, AUsersOwnSettingsStay) {
  Launch launch(
      shell({"--nproc-per-node", "2", "--no-prefix", "--local-ranks-filter", "0", "--rdzv-id", "job7"}, "env"),
      {"OMP_NUM_THREADS=5", "TORCH_NCCL_ASYNC_ERROR_HANDLING=3"});
  EXPECT_EQ(launch.wait(), 0);
  EXPECT_EQ(value_of(launch.out(), "OMP_NUM_THREADS"), "5");
  EXPECT_EQ(value_of(launch.out(), "TORCH_NCCL_ASYNC_ERROR_HANDLING"), "3");
  EXPECT_EQ(value_of(launch.out(), "TORCHELASTIC_RUN_ID"), "job7");
  EXPECT_EQ(launch.err(), "");
}

TEST(Run, OptionsComeFromPetVariablesAndTheCommandLineWins) {
  Launch from_environment(shell({}, "echo $WORLD_SIZE"), {"PET_NPROC_PER_NODE=2", "PET_NO_PREFIX=1"});
  EXPECT_EQ(from_environment.wait(), 0);
  EXPECT_EQ(from_environment.out(), "2\n2\n");
  Launch both(shell({"--nproc-per-node", "1"}, "echo $WORLD_SIZE"), {"PET_NPROC_PER_NODE=2", "PET_NO_PREFIX=0"});
  EXPECT_EQ(both.wait(), 0);
  EXPECT_EQ(both.out(), "[rank 0] 1\n");
  Launch refused(shell({}, "true"), {"PET_MAX_RESTARTS=3"});
  EXPECT_EQ(refused.wait(), 2);
}

TEST(Run, DryRunStartsNothing) {
  Launch launch(shell({"--nproc-per-node", "2", "--dry-run"}, "touch /tmp/should-not-exist-fsdp2"));
  EXPECT_EQ(launch.wait(), 0);
  EXPECT_TRUE(contains(launch.out(), "# rank 0: "));
  EXPECT_TRUE(contains(launch.out(), "LOCAL_RANK=1\n"));
  EXPECT_NE(access("/tmp/should-not-exist-fsdp2", F_OK), 0);
}

struct BadUse {
  std::vector<std::string> arguments;
  int code;
  std::string text;
};

TEST(Run, ErrorsNameTheOptionAndTheFix) {
  const BadUse uses[] = {
      {{"--nproc-per-nod", "2", "true"}, 2, "unknown option --nproc-per-nod; did you mean --nproc-per-node?"},
      {{"--nproc-per-node", "zero", "true"}, 2, "--nproc-per-node: got 'zero'; allowed are"},
      {{"--nproc-per-node", "0", "true"}, 2, "got '0'"},
      {{"--nproc-per-node", "2"}, 2, "no program to start"},
      {{"--max-restarts", "3", "true"}, 2, "--max-restarts is an option of torchrun that fsdp2 run does not offer"},
      {{"--max_restarts=3", "true"}, 2, "ranks are not restarted"},
      {{"--numa-binding", "node", "true"}, 2, "numactl"},
      {{"--virtual-local-rank", "true"}, 2, "--virtual-local-rank"},
      {{"--nnodes", "1:4", "true"}, 2, "a range of nodes"},
      {{"--nnodes", "2", "true"}, 2, "needs --master-addr"},
      {{"--node-rank", "1", "true"}, 2, "--node-rank: got '1'"},
      {{"--rdzv-backend", "etcd", "true"}, 2, "--rdzv-backend etcd"},
      {{"--tee", "3", "true"}, 2, "--log-dir"},
      {{"--signals-to-handle", "SIGKILL", "true"}, 2, "cannot be handled"},
      {{"./no-such-program"}, 127, "cannot execute the program ./no-such-program: no such file"},
      {{"no-such-script.py"}, 127, "cannot read the script no-such-script.py"},
      {{"/etc/passwd"}, 127, "chmod +x"},
  };
  for (const auto& use : uses) {
    Launch launch(use.arguments);
    EXPECT_EQ(launch.wait(), use.code) << use.text;
    EXPECT_TRUE(contains(launch.err(), use.text)) << "expected: " << use.text << "\ngot: " << launch.err();
    EXPECT_EQ(launch.out(), "");
  }
  for (auto harmless : {"--max-restarts=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--standalone"}) {
    Launch launch({harmless, "true"});
    EXPECT_EQ(launch.wait(), 0) << launch.err();
  }
}

TEST(Run, TwentyPairsOfSimultaneousLaunchesSucceed) {
  std::set<std::string> ports;
  for (int pair = 0; pair < 20; ++pair) {
    std::vector<std::string> arguments =
        shell({"--standalone", "--nproc-per-node", "2", "--no-prefix"}, "echo MASTER_PORT=$MASTER_PORT");
    Launch first(arguments), second(arguments);
    EXPECT_EQ(first.wait(), 0) << first.err();
    EXPECT_EQ(second.wait(), 0) << second.err();
    EXPECT_NE(value_of(first.out(), "MASTER_PORT"), value_of(second.out(), "MASTER_PORT"));
  }
}

TEST(Run, TwoNodesShareRanksAndFailures) {
  auto node = [](int rank, const std::string& command) {
    return shell({"--nnodes", "2", "--node-rank", std::to_string(rank), "--master-addr", "127.0.0.1", "--master-port",
                  "29637", "--nproc-per-node", rank == 0 ? "1" : "2"},
                 command);
  };
  {
    Launch zero(node(0, "echo $RANK/$WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE"));
    Launch one(node(1, "echo $RANK/$WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE"));
    EXPECT_EQ(zero.wait(), 0) << zero.err();
    EXPECT_EQ(one.wait(), 0) << one.err();
    EXPECT_EQ(zero.out(), "[rank 0] 0/3 0/2\n");
    EXPECT_TRUE(contains(one.out(), "[rank 1] 1/3 1/2\n") && contains(one.out(), "[rank 2] 2/3 1/2\n")) << one.out();
  }
  Launch zero(node(0, "sleep 60")), one(node(1, "[ $LOCAL_RANK = 1 ] && exit 9; sleep 60"));
  EXPECT_EQ(one.wait(30), 9) << one.err();
  EXPECT_EQ(zero.wait(30), 143) << zero.err();
  EXPECT_TRUE(contains(zero.err(), "rank 2 on node 1 ended with code 9")) << zero.err();
}

}  // namespace
}  // namespace fsdp2::testing
