// The main of all test programs. Test files of a folder may be compiled into one program that has a name (a link) for
// each of them: called by the name of a file, it runs the tests of that file.

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

namespace {

/// dcp_save_load_test of tests/dcp/save_load_test.cpp.
std::string program_of(const std::filesystem::path& file) {
  return file.parent_path().filename().string() + "_" + file.stem().string();
}

std::string tests_of(const std::string& program) {
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  std::string filter;
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const testing::TestInfo& test = *suite.GetTestInfo(j);
      if (program_of(test.file()) == program) filter += std::string(suite.name()) + "." + test.name() + ":";
    }
  }
  return filter;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (GTEST_FLAG_GET(filter) == "*") {
    const std::string filter = tests_of(std::filesystem::path(argv[0]).filename().string());
    if (!filter.empty()) GTEST_FLAG_SET(filter, filter);
  }
  return RUN_ALL_TESTS();
}
