// labels: ranks, slow
// timeout: 600
// needs: programs
// `make demo` with a model small enough for a test: every row is shown, and a row that fails is noticed.

#include <gtest/gtest.h>

#include <filesystem>

#include "launcher/launch.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

ProcessResult run_demo(const std::string& out, const std::string& learning_rate) {
  auto bin = std::filesystem::path(fsdp2_program()).parent_path().string();
  return run_process({test_file("../scripts/demo.sh"), "--bin", bin, "--out", out, "--steps", "44", "--save-at", "20",
                      "--text", test_file("../src"), "--", "--dim", "64", "--layers", "2", "--heads", "4", "--kv-heads",
                      "2", "--ffn", "128", "--seq", "64", "--lr", learning_rate},
                     {}, std::chrono::seconds(280));
}

TEST(Demo, EveryRowIsShown) {
  TempDir folder;
  auto demo = run_demo(folder.path() + "/out", "1e-2");
  EXPECT_EQ(demo.exit_code, 0) << demo.output;
  auto table = demo.output.substr(demo.output.find("== what was shown"));
  EXPECT_EQ(table.find("FAIL"), std::string::npos) << table;
  for (auto text : {"sharded over 2", "resumed on 4 processes             24 losses", "137 (128 + 9), 0 processes left",
                    "resumed on 1 process               24 losses"}) {
    EXPECT_NE(table.find(text), std::string::npos) << table;
  }
}

TEST(Demo, ARowThatFailsMakesItFail) {
  TempDir folder;
  auto demo = run_demo(folder.path() + "/out", "0");  // learns nothing
  EXPECT_EQ(demo.exit_code, 1) << demo.output;
  EXPECT_NE(demo.output.find("FAIL  trained on 2 processes"), std::string::npos) << demo.output;
}

}  // namespace
}  // namespace fsdp2::testing
