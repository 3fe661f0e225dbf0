// labels: ranks
// timeout: 480
// needs: programs
// The program on the page about checkpoints is the one that is built; it goes on after a stop as if there had been
// none.

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <sstream>

#include "launcher/launch.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

const std::string kRoot = test_file("..");

std::map<int, std::string> run_program(const std::string& folder, int num_ranks, int steps) {
  const auto program = std::filesystem::path(fsdp2_program()).parent_path() / "checkpoints";
  Launch launch({"--nproc-per-node", std::to_string(num_ranks), "--local-ranks-filter", "0", "--no-prefix",
                 program.string(), folder, std::to_string(steps)});
  EXPECT_EQ(launch.wait(100), 0) << launch.err();
  std::map<int, std::string> losses;
  std::istringstream stream(launch.out());
  std::string step_word, loss_word, loss;
  for (int step = 0; stream >> step_word >> step >> loss_word >> loss;) losses[step] = loss;
  return losses;
}

TEST(CheckpointsPage, ShowsTheProgramAndLinksThatLeadSomewhere) {
  const std::string page = read_file(kRoot + "/docs/checkpoints.md");
  const size_t begin = page.find("```cpp\n") + 7, end = page.find("```", begin);
  ASSERT_NE(begin, std::string::npos + 7);
  EXPECT_EQ(page.substr(begin, end - begin), read_file(kRoot + "/examples/checkpoints/main.cpp"));
  EXPECT_TRUE(std::filesystem::exists(kRoot + "/docs/dcp_format.md"));
}

TEST(CheckpointsPage, TheProgramGoesOnAsIfItHadNotStopped) {
  const TempDir folder;
  const auto whole = run_program(folder.path() + "/whole", 2, 40);
  ASSERT_EQ(whole.size(), 40u);
  EXPECT_LT(std::stod(whole.at(40)), 0.5 * std::stod(whole.at(1)));
  const std::string run = folder.path() + "/run";
  const auto first = run_program(run, 2, 21), second = run_program(run, 2, 40);
  ASSERT_EQ(first.size(), 21u);
  ASSERT_EQ(second.size(), 20u) << "saved at step 20, so from 21 on";
  for (const auto& [step, loss] : first) EXPECT_EQ(loss, whole.at(step)) << "step " << step;
  for (const auto& [step, loss] : second) EXPECT_EQ(loss, whole.at(step)) << "step " << step;
  const auto third = run_program(run, 3, 45);
  EXPECT_EQ(third.begin()->first, 41);
  EXPECT_EQ(third.size(), 5u);
  size_t kept = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(run)) ++kept;
  EXPECT_EQ(kept, 2u);
}

}  // namespace
}  // namespace fsdp2::testing
