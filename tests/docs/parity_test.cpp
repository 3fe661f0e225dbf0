// Every test that docs/parity.md names exists where it says, and every upstream test has one row.

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <regex>
#include <sstream>

#include "docs/test_sources.h"

namespace {

using fsdp2::testing::declares;
using fsdp2::testing::read_file;
using fsdp2::testing::source_of;
using fsdp2::testing::test_file;
const std::string kTable = test_file("../docs/parity.md");

TEST(Parity, NamesTestsThatExist) {
  const std::string table = read_file(kTable);
  const std::regex named("`([a-z0-9_]+): ([A-Za-z0-9]+)\\.([A-Za-z0-9]+)`");
  std::map<std::string, std::string> sources;
  int count = 0;
  for (auto match = std::sregex_iterator(table.begin(), table.end(), named); match != std::sregex_iterator(); ++match) {
    const std::string executable = (*match)[1], suite = (*match)[2], name = (*match)[3];
    const std::string path = source_of(executable);
    ASSERT_TRUE(std::filesystem::exists(path)) << (*match)[0] << ": there is no " << path;
    const auto source = sources.try_emplace(executable, read_file(path)).first;
    EXPECT_TRUE(declares(source->second, suite, name)) << (*match)[0] << " is not in " << path;
    ++count;
  }
  EXPECT_GT(count, 100);
}

TEST(Parity, HasOneRowForEveryUpstreamTest) {
  constexpr int kLast = 313;
  std::istringstream table(read_file(kTable));
  const std::regex row(R"(\| ([0-9][-0-9, ]*) \| (.*[^ ].*) \| (.*[^ ].*) \|)"), part("([0-9]+)(-([0-9]+))?");
  std::map<int, int> rows;
  for (std::string line; std::getline(table, line);) {
    std::smatch cells;
    if (line.rfind("| ", 0) != 0 || !std::isdigit(static_cast<unsigned char>(line[2]))) continue;
    ASSERT_TRUE(std::regex_match(line, cells, row)) << line;
    const std::string numbers = cells[1];
    for (auto match = std::sregex_iterator(numbers.begin(), numbers.end(), part); match != std::sregex_iterator();
         ++match) {
      const int first = std::stoi((*match)[1]), last = (*match)[3].matched ? std::stoi((*match)[3]) : first;
      for (int number = first; number <= last; ++number) ++rows[number];
    }
  }
  for (int number = 1; number <= kLast; ++number) EXPECT_EQ(rows[number], 1) << "test " << number;
  EXPECT_EQ(rows.size(), static_cast<size_t>(kLast));
}

}  // namespace
