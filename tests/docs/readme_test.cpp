// The program in the README is the one that is built, and its links lead somewhere.

#include <gtest/gtest.h>

#include <filesystem>
#include <regex>

#include "support/ranks.h"

namespace {

using fsdp2::testing::read_file;
const std::string kRoot = fsdp2::testing::test_file("..");

TEST(Readme, ShowsTheQuickstartExample) {
  const std::string readme = read_file(kRoot + "/README.md");
  const size_t begin = readme.find("```cpp\n") + 7, end = readme.find("```", begin);
  ASSERT_NE(begin, std::string::npos + 7);
  EXPECT_EQ(readme.substr(begin, end - begin), read_file(kRoot + "/examples/quickstart/main.cpp"));
}

TEST(Readme, LinksLeadSomewhere) {
  for (const char* name : {"/README.md", "/HACKING.md"}) {
    const std::string text = read_file(kRoot + name);
    const std::regex link(R"(\]\(([^)#:]+)\))");
    for (auto match = std::sregex_iterator(text.begin(), text.end(), link); match != std::sregex_iterator(); ++match) {
      EXPECT_TRUE(std::filesystem::exists(kRoot + "/" + (*match)[1].str())) << name << ": " << (*match)[1];
    }
  }
}

}  // namespace
