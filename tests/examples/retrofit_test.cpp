// labels: ranks
// timeout: 480
// needs: programs
// The programs of examples/retrofit: the change is small, the numbers are the same, diagnose() finds nothing, and what
// 2 ranks saved 3 ranks load.

#include <gtest/gtest.h>

#include <sstream>

#include "support/ranks.h"

namespace {

using namespace fsdp2::testing;
using Words = std::vector<std::string>;

ProcessResult run_retrofit(int num_ranks, const std::string& program, const Words& args) {
  Words words{build_folder() + "/bin/fsdp2", "run", "--nproc-per-node", std::to_string(num_ranks),
              build_folder() + "/bin/retrofit_" + program};
  words.insert(words.end(), args.begin(), args.end());
  return run_process(words, {"OMP_NUM_THREADS=1"});
}

struct Program {
  const char* name;
  Words on_2, on_3;  // `saved` stands for the checkpoint's path
};

Words with_path(Words words, const std::string& path) {
  for (std::string& word : words) {
    if (word == "saved") word = path;
  }
  return words;
}

class Retrofit : public ::testing::TestWithParam<Program> {};

TEST_P(Retrofit, ChangesFewLines) {
  const std::string folder = test_file("../examples/retrofit/") + GetParam().name;
  const ProcessResult diff = run_process({"diff", folder + "/before.cpp", folder + "/after.cpp"});
  int changed = 0;
  std::istringstream lines(diff.output);
  for (std::string line; std::getline(lines, line);) changed += line[0] == '>';
  EXPECT_LT(changed, 40);
  EXPECT_GT(changed, 10) << diff.output;
  const std::string row = std::string("[") + GetParam().name + "](" + GetParam().name + ")";
  const std::string readme = read_file(test_file("../examples/retrofit/README.md"));
  const size_t begin = readme.find(row);
  ASSERT_NE(begin, std::string::npos) << row;
  EXPECT_NE(readme.substr(begin, readme.find('\n', begin) - begin).find(" " + std::to_string(changed) + " |"),
            std::string::npos)
      << changed;
}

TEST_P(Retrofit, TrainsAsBefore) {
  const ProcessResult parity = run_retrofit(2, std::string(GetParam().name) + "_parity", {});
  EXPECT_EQ(parity.exit_code, 0) << parity.output;
  EXPECT_NE(parity.output.find("equal"), std::string::npos) << parity.output;
}

TEST_P(Retrofit, IsCleanAndLoadsOnAnotherNumberOfRanks) {
  const TempDir folder;
  const std::string path = folder.path() + "/saved", program = std::string(GetParam().name) + "_after";
  for (const int num_ranks : {2, 3}) {
    const ProcessResult run =
        run_retrofit(num_ranks, program, with_path(num_ranks == 2 ? GetParam().on_2 : GetParam().on_3, path));
    EXPECT_EQ(run.exit_code, 0) << run.output;
    EXPECT_NE(run.output.find("diagnose: nothing found"), std::string::npos) << run.output;
  }
  const ProcessResult verify = run_process({build_folder() + "/bin/fsdp2", "checkpoint", "verify", path});
  EXPECT_EQ(verify.exit_code, 0) << verify.output;
}

INSTANTIATE_TEST_SUITE_P(All, Retrofit,
                         ::testing::Values(Program{"classifier",
                                                   {"--steps", "3", "--save", "saved", "--check", "yes"},
                                                   {"--steps", "5", "--load", "saved", "--check", "yes"}},
                                           Program{"encoder_decoder",
                                                   {"--steps", "3", "--save-every", "3", "--checkpoint", "saved",
                                                    "--check"},
                                                   {"--steps", "5", "--checkpoint", "saved", "--resume", "--check"}},
                                           Program{"two_tower",
                                                   {"--steps", "3", "--out", "saved", "--check", "yes"},
                                                   {"--steps", "5", "--resume", "saved", "--check", "yes"}}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
