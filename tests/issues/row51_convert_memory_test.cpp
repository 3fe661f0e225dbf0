// labels: slow
// needs: programs
// A converter that needs the whole model in memory, or says that it succeeded and wrote nothing.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "launcher/launch.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

struct Outcome {
  int code;
  int64_t peak;  // bytes of resident memory
};

Outcome run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {fsdp2_program(), "checkpoint"});
  std::vector<char*> argv;
  for (std::string& word : arguments) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    setenv("OMP_NUM_THREADS", "1", 1);
    execv(argv[0], argv.data());
    _exit(127);
  }
  int status = 0;
  rusage usage{};
  wait4(child, &status, 0, &usage);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), usage.ru_maxrss * 1024};
}

/// One tensor "big" and a small one, as a sparse file.
void write_sparse(const std::string& path, int64_t rows, int64_t columns) {
  const int64_t bytes = rows * columns * 4;
  const std::string header = "{\"big\":{\"dtype\":\"F32\",\"shape\":[" + std::to_string(rows) + "," +
                             std::to_string(columns) + "],\"data_offsets\":[0," + std::to_string(bytes) +
                             "]},\"small\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[" + std::to_string(bytes) +
                             "," + std::to_string(bytes + 3) + "]}}";
  const uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), 8);
  file << header;
  file.seekp(bytes, std::ios::cur);
  file << "abc";
}

TEST(Row51, AConversionHoldsSomeMiBWhateverTheSize) {
  constexpr int64_t kMiB = int64_t{1} << 20, kLimit = 64 * kMiB;
  TempDir dir;
  const auto path = [&](const std::string& name) { return dir.path() + "/" + name; };
  write_sparse(path("small.safetensors"), 4, 256);
  const Outcome base = run({"convert", path("small.safetensors"), path("base")});
  ASSERT_EQ(base.code, 0);
  // Rows of 100 MiB, so that a row has to be cut too; 200 MiB in all.
  write_sparse(path("big.safetensors"), 2, 25 * kMiB);
  struct Step {
    const char* what;
    std::vector<std::string> arguments;
  };
  const Step steps[] = {
      {"safetensors to DCP", {"convert", path("big.safetensors"), path("dcp")}},
      {"DCP on other ranks", {"reshard", path("dcp"), path("two"), "--ranks", "2"}},
      {"DCP to safetensors, cast", {"convert", path("two"), path("hf"), "--dtype", "bfloat16"}},
  };
  for (const auto& [what, arguments] : steps) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.code, 0) << what;
    EXPECT_LT(outcome.peak, base.peak + kLimit) << what << ": " << (outcome.peak - base.peak) / kMiB << " MiB";
  }
  const std::string file = path("hf/model-00001-of-00001.safetensors");
  EXPECT_GT(std::filesystem::file_size(file), static_cast<uint64_t>(100 * kMiB));
  std::ifstream written(file, std::ios::binary);
  written.seekg(-3, std::ios::end);
  std::string tail(3, ' ');
  written.read(tail.data(), 3);
  EXPECT_EQ(tail, "abc");
}

}  // namespace
}  // namespace fsdp2::testing
