// Every input that was ever interesting to a fuzzer (tests/fuzz/corpus) ends in a result or in an fsdp2::Error.

#include <filesystem>

#include "dcp/stored_metadata.h"
#include "fuzz/targets.h"
#include "support/ranks.h"

namespace fsdp2::fuzz {
namespace {

TEST(FuzzCorpus, EveryInputIsReadOrRefused) {
  for (const Target& target : kTargets) {
    const std::string folder = testing::test_file(std::string("fuzz/corpus/") + target.name);
    size_t inputs = 0, read = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      SCOPED_TRACE(entry.path().string());
      const std::string bytes = testing::read_file(entry.path().string());
      ++inputs;
      try {
        target.read(bytes);
        ++read;
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("fuzz"), std::string::npos) << "no file is named: " << error.what();
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    }
    EXPECT_GE(inputs, 5u) << folder;
    EXPECT_GE(read, 1u) << folder << ": all are refused, the seeds are out of date";
    EXPECT_LT(read, inputs) << folder << ": none is refused";
  }
}

}  // namespace
}  // namespace fsdp2::fuzz
