// labels: ranks
// timeout: 480
// needs: programs
// The smallest program, as its first lines tell the reader to run it.

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <sstream>

#include "launcher/launch.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

std::map<int, double> run_reference(const std::string& folder, int num_ranks, const std::string& arguments) {
  auto program = std::filesystem::path(fsdp2_program()).parent_path() / "reference_train";
  Launch launch({"--nproc-per-node", std::to_string(num_ranks), "--local-ranks-filter", "0", "--no-prefix", "sh", "-c",
                 "cd " + folder + " && exec " + program.string() + " " + arguments});
  EXPECT_EQ(launch.wait(100), 0) << launch.err();
  std::map<int, double> losses;
  std::istringstream stream(launch.out());
  std::string step_word, loss_word;
  int step = 0;
  for (double loss = 0; stream >> step_word >> step >> loss_word >> loss;) losses[step] = loss;
  return losses;
}

TEST(Reference, LearnsSavesAndResumesOnOtherNumbersOfRanks) {
  TempDir folder;
  auto whole = run_reference(folder.path(), 2, "");
  ASSERT_EQ(whole.size(), 20u);
  EXPECT_LT(whole[20], whole[1]);
  for (int num_ranks : {4, 1}) {
    auto resumed = run_reference(folder.path(), num_ranks, "--resume");
    ASSERT_EQ(resumed.size(), 10u);
    for (const auto& [step, loss] : resumed) EXPECT_NEAR(loss, whole[step], 2e-5) << "step " << step;
  }
}

}  // namespace
}  // namespace fsdp2::testing
