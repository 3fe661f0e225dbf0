// The faults of tests/mutations fit the sources, and the tests that must catch them exist. run.sh there takes an hour.

#include <gtest/gtest.h>

#include <filesystem>
#include <regex>

#include "docs/test_sources.h"

namespace {

using namespace fsdp2::testing;

TEST(Mutations, FitTheSourcesAndNameTestsThatExist) {
  const std::regex head("Fault: [^\n]+\nTest: ([a-z0-9_]+) ([^\n]+)\n\n---");
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(test_file("mutations"))) {
    if (entry.path().extension() != ".patch") continue;
    ++count;
    SCOPED_TRACE(entry.path().filename().string());
    const std::string text = read_file(entry.path().string());
    std::smatch named;
    ASSERT_TRUE(std::regex_search(text, named, head, std::regex_constants::match_continuous));
    const std::string source = read_file(source_of(named[1])), filters = named[2];
    const std::regex filter("([^.:]+)\\.([^:]+)");
    for (auto each = std::sregex_iterator(filters.begin(), filters.end(), filter); each != std::sregex_iterator();
         ++each) {
      const std::string name = std::regex_replace((*each)[2].str(), std::regex("\\*"), "\\w*");
      EXPECT_TRUE(declares(source, (*each)[1], name)) << each->str();
    }
    const ProcessResult result = run_process({"git", "-C", test_file(".."), "apply", "--check", entry.path().string()});
    EXPECT_EQ(result.exit_code, 0) << result.output;
  }
  EXPECT_GT(count, 40);
}

}  // namespace
