// labels: ranks
// timeout: 480
// The examples are right: FSDP2_DIAGNOSE=1 finds nothing in them.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "launcher/launch.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

/// What the job says; the programs write into a fresh folder.
std::string output_of(int num_ranks, const std::string& program, const std::vector<std::string>& args) {
  const TempDir folder;
  const auto path = std::filesystem::path(fsdp2_program()).parent_path() / program;
  std::vector<std::string> command{"env",           "-C",  folder.path(),      "OMP_NUM_THREADS=1",
                                   fsdp2_program(), "run", "--nproc-per-node", std::to_string(num_ranks),
                                   path.string()};
  command.insert(command.end(), args.begin(), args.end());
  const ProcessResult result = run_process(command, {"FSDP2_DIAGNOSE=1"});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  return result.output;
}

void expect_clean(int num_ranks, const std::string& program, const std::vector<std::string>& args = {}) {
  const std::string text = output_of(num_ranks, program, args);
  EXPECT_NE(text.find("fsdp2 diagnose: nothing found"), std::string::npos) << text;
}

TEST(DiagnoseExamples, NothingIsFoundInThem) {
  for (const int num_ranks : {1, 2}) {
    expect_clean(num_ranks, "quickstart");
    expect_clean(num_ranks, "reference_train");
    expect_clean(num_ranks, "checkpoints", {"run", "2"});
  }
}

TEST(DiagnoseExamples, NothingIsFoundInTheDemo) {
  const TempDir folder;
  const std::string text = folder.path() + "/text";
  std::ofstream(text) << std::string(20000, 'a');
  expect_clean(2, "llama_train", {"--text", text, "--steps", "2", "--layers", "2"});
  expect_clean(3, "llama_train", {"--text", text, "--steps", "2", "--layers", "2", "--batch", "6", "--bf16"});
}

}  // namespace
}  // namespace fsdp2::testing
