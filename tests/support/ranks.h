#pragma once

// Runs a test body on N real processes with a Gloo group on loopback.

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace fsdp2::testing {

struct RanksOptions {
  std::chrono::seconds timeout{90};  // then every rank is killed and the test fails
  bool init_process_group = true;    // FileStore rendezvous, one thread per rank
  std::string backend = {};          // empty: FSDP2_TEST_BACKEND, else "gloo"
};

/// Forks `num_ranks` children that run `body(rank)`; fails with every rank's text if one fails, throws, is killed
/// or is late. The calling process must not have used libtorch's threads: do everything inside the body.
::testing::AssertionResult run_ranks(int num_ranks, const std::function<void(int rank)>& body,
                                     RanksOptions options = {});

struct ProcessResult {
  int exit_code = -1;  // 128 + signal number where a signal ended it
  std::string output;  // stdout and stderr together
};
/// Runs a program, bounded in time, with extra "NAME=value" environment entries.
ProcessResult run_process(const std::vector<std::string>& argv, const std::vector<std::string>& environment = {},
                          std::chrono::seconds timeout = std::chrono::seconds(120));
/// `python -m torch.distributed.run --nproc-per-node N script args…` of the torch release that is linked.
ProcessResult run_python_ranks(int num_ranks, const std::string& script, const std::vector<std::string>& args,
                               std::chrono::seconds timeout = std::chrono::seconds(180));
/// One Python process, `python script args…`.
ProcessResult run_python(const std::string& script, const std::vector<std::string>& args,
                         std::chrono::seconds timeout = std::chrono::seconds(180));

/// A fresh folder, removed with everything in it when the object dies in the process that made it.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int owner_;
};

/// Absolute path of a file under tests/ in the source tree.
std::string test_file(const std::string& relative);
/// All bytes of a file; empty where it cannot be read.
std::string read_file(const std::string& path);
/// Absolute path of the build tree that the test belongs to.
std::string build_folder();

}  // namespace fsdp2::testing

/// TEST whose body runs on `num_ranks` processes, with `rank` in scope.
#define RANKS_TEST(suite, name, num_ranks)                                                             \
  static void suite##_##name##_body(int rank);                                                         \
  TEST(suite, name) { ASSERT_TRUE(::fsdp2::testing::run_ranks(num_ranks, suite##_##name##_body)); }     \
  static void suite##_##name##_body([[maybe_unused]] int rank)

/// Expects fsdp2::Error of `error_code` whose text contains `text`.
#define EXPECT_FSDP2_ERROR(statement, error_code, text)                                                \
  do {                                                                                                 \
    try {                                                                                              \
      statement;                                                                                       \
      ADD_FAILURE() << "no error from: " #statement;                                                   \
    } catch (const ::fsdp2::Error& error) {                                                            \
      EXPECT_EQ(error.code(), ::fsdp2::ErrorCode::error_code) << error.what();                         \
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();              \
    }                                                                                                  \
  } while (false)
