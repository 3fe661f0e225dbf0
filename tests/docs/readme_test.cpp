// The program in the README is the one that is built, and its links lead somewhere.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>

#include "support/ranks.h"

namespace {

std::string read(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

const std::string kRoot = fsdp2::testing::test_file("..");

TEST(Readme, ShowsTheQuickstartExample) {
  const std::string readme = read(kRoot + "/README.md");
  const size_t begin = readme.find("```cpp\n") + 7, end = readme.find("```", begin);
  ASSERT_NE(begin, std::string::npos + 7);
  EXPECT_EQ(readme.substr(begin, end - begin), read(kRoot + "/examples/quickstart/main.cpp"));
}

TEST(Readme, LinksLeadSomewhere) {
  for (const char* name : {"/README.md", "/HACKING.md"}) {
    const std::string text = read(kRoot + name);
    const std::regex link(R"(\]\(([^)#:]+)\))");
    for (auto match = std::sregex_iterator(text.begin(), text.end(), link); match != std::sregex_iterator(); ++match) {
      EXPECT_TRUE(std::filesystem::exists(kRoot + "/" + (*match)[1].str())) << name << ": " << (*match)[1];
    }
  }
}

}  // namespace
