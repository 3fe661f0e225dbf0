#include "support/ranks.h"

#include <ATen/Parallel.h>
#include <fsdp2/process_group.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <system_error>

extern char** environ;

namespace fsdp2::testing {
namespace {

using Clock = std::chrono::steady_clock;

// After one rank failed the others get this long to say what they saw before they are killed.
constexpr auto kGraceAfterFailure = std::chrono::seconds(5);
constexpr size_t kMaxOutputBytes = 1 << 20;

[[noreturn]] void throw_errno(const char* call) { throw std::system_error(errno, std::generic_category(), call); }

// A started child with the read end of the pipe that carries its stdout and stderr.
struct Child {
  pid_t pid = -1;
  int output_fd = -1;
  std::string output;
  int exit_code = -1;  // -1 while it runs

  bool running() const { return exit_code < 0; }
};

int exit_code_of(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

// Forks; `in_child` runs with stdout and stderr in the pipe, in a process group of its own, and must not return.
// The child dies with this process, so that a test that ctest kills leaves nobody behind.
template <class F>
Child spawn(const F& in_child) {
  std::fflush(nullptr);
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) throw_errno("pipe2");
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw_errno("fork");
  if (pid == 0) {
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    const int null_fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    ::dup2(null_fd, STDIN_FILENO);
    ::dup2(fds[1], STDOUT_FILENO);
    ::dup2(fds[1], STDERR_FILENO);
    ::close(fds[0]);
    ::close(fds[1]);
    in_child();
    ::_exit(127);
  }
  ::setpgid(pid, pid);  // in both processes: whoever comes first
  ::close(fds[1]);
  ::fcntl(fds[0], F_SETFL, O_NONBLOCK);
  Child child;
  child.pid = pid;
  child.output_fd = fds[0];
  return child;
}

// Reads what is there. Closes the pipe at its end.
void drain(Child& child) {
  char buffer[4096];
  while (child.output_fd >= 0) {
    const ssize_t count = ::read(child.output_fd, buffer, sizeof(buffer));
    if (count > 0) {
      if (child.output.size() < kMaxOutputBytes) child.output.append(buffer, static_cast<size_t>(count));
    } else if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
      return;
    } else {
      ::close(child.output_fd);
      child.output_fd = -1;
    }
  }
}

void poll_children(std::vector<Child>& children) {
  std::vector<pollfd> fds;
  for (const Child& child : children) {
    if (child.output_fd >= 0) fds.push_back({child.output_fd, POLLIN, 0});
  }
  ::poll(fds.data(), fds.size(), 50);
  for (Child& child : children) {
    drain(child);
    int status = 0;
    if (child.running() && ::waitpid(child.pid, &status, WNOHANG) == child.pid) {
      child.exit_code = exit_code_of(status);
      drain(child);
    }
  }
}

// Kills every process group, also of children that ended: something they started may live on.
void kill_all(std::vector<Child>& children) {
  for (Child& child : children) ::kill(-child.pid, SIGKILL);
  for (Child& child : children) {
    int status = 0;
    if (child.running() && ::waitpid(child.pid, &status, 0) == child.pid) child.exit_code = exit_code_of(status);
    drain(child);
    if (child.output_fd >= 0) ::close(child.output_fd);
    child.output_fd = -1;
  }
}

enum class WaitResult { kEnded, kTimedOut };

WaitResult wait_all(std::vector<Child>& children, std::chrono::seconds timeout, bool stop_after_failure) {
  auto deadline = Clock::now() + timeout;
  bool failed = false;
  WaitResult result = WaitResult::kEnded;
  for (;;) {
    poll_children(children);
    bool running = false;
    for (const Child& child : children) {
      running |= child.running();
      if (stop_after_failure && !failed && child.exit_code > 0) {
        failed = true;
        deadline = std::min(deadline, Clock::now() + kGraceAfterFailure);
      }
    }
    if (!running) break;
    if (Clock::now() > deadline) {
      if (!failed) result = WaitResult::kTimedOut;
      break;
    }
  }
  kill_all(children);
  return result;
}

std::string describe_exit(int exit_code) {
  if (exit_code == 0) return "passed";
  if (exit_code > 128) return std::string("ended by ") + ::strsignal(exit_code - 128);
  return "failed with exit code " + std::to_string(exit_code);
}

void append_with_prefix(std::ostringstream& out, int rank, const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) out << "[rank " << rank << "] " << line << '\n';
}

// What a forked rank does. Ends the process.
[[noreturn]] void run_rank(int rank, int num_ranks, const std::string& store, const std::function<void(int)>& body,
                           const RanksOptions& options) {
  int exit_code = 0;
  try {
    at::set_num_threads(1);
    if (options.init_process_group) {
      const char* asked = std::getenv("FSDP2_TEST_BACKEND");
      const std::string usual = asked != nullptr ? asked : "gloo";
      init_process_group({.backend = options.backend.empty() ? usual : options.backend,
                          .init_method = "file://" + store,
                          .timeout = std::chrono::seconds(60),
                          .rank = rank,
                          .world_size = num_ranks,
                          .local_rank = rank});
    }
    body(rank);
    if (::testing::Test::HasFailure()) {
      exit_code = 1;
    } else {
      destroy_process_group();
    }
  } catch (const std::exception& error) {
    std::cout << "exception: " << error.what() << std::endl;
    exit_code = 1;
  } catch (...) {
    std::cout << "exception of an unknown type" << std::endl;
    exit_code = 1;
  }
  std::cout.flush();
  std::fflush(nullptr);
  // No destructors of statics: the parent's test results are none of this process's business.
  ::_exit(exit_code);
}

int num_threads() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) ++count;
  return count;
}

std::string python() {
  const char* chosen = std::getenv("FSDP2_TEST_PYTHON");
  const std::string path = chosen != nullptr ? chosen : FSDP2_TEST_PYTHON;
  if (path.empty()) {
    throw std::runtime_error(
        "this test compares with Python: configure with -DFSDP2_TEST_PYTHON=<python with the linked torch>");
  }
  return path;
}

std::string script_path(const std::string& script) {
  return std::filesystem::path(script).is_absolute() ? script : test_file(script);
}

const std::vector<std::string> kPythonEnvironment = {"OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", "PYTHONUNBUFFERED=1",
                                                     "PYTHONDONTWRITEBYTECODE=1"};

}  // namespace

::testing::AssertionResult run_ranks(int num_ranks, const std::function<void(int rank)>& body, RanksOptions options) {
  // A thread does not survive fork, but the locks that it holds do.
  if (num_threads() != 1) {
    return ::testing::AssertionFailure() << "run_ranks in a process with " << num_threads()
                                         << " threads: use libtorch inside the body only";
  }
  if (::testing::Test::HasFailure()) {
    return ::testing::AssertionFailure() << "not run: the test had failed before";
  }
  TempDir folder;
  const std::string store = folder.path() + "/store";
  std::vector<Child> children;
  for (int rank = 0; rank < num_ranks; ++rank) {
    children.push_back(spawn([&] { run_rank(rank, num_ranks, store, body, options); }));
  }
  const WaitResult result = wait_all(children, options.timeout, /*stop_after_failure=*/true);

  bool passed = result == WaitResult::kEnded;
  std::ostringstream text;
  if (!passed) text << "ranks were killed after " << options.timeout.count() << " s\n";
  for (int rank = 0; rank < num_ranks; ++rank) {
    const Child& child = children[static_cast<size_t>(rank)];
    passed &= child.exit_code == 0;
    text << "[rank " << rank << "] " << describe_exit(child.exit_code) << '\n';
    append_with_prefix(text, rank, child.output);
  }
  return passed ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << text.str();
}

ProcessResult run_process(const std::vector<std::string>& argv, const std::vector<std::string>& environment,
                          std::chrono::seconds timeout) {
  // Everything that allocates comes before the fork: this process may have threads.
  std::vector<char*> arguments;
  for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  std::vector<char*> variables;
  for (const std::string& entry : environment) variables.push_back(const_cast<char*>(entry.c_str()));
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string name(*entry, std::strcspn(*entry, "=") + 1);
    bool replaced = name == "GTEST_OUTPUT=";  // a test program that a test starts must not write over its results
    for (const std::string& own : environment) replaced |= own.starts_with(name);
    if (!replaced) variables.push_back(*entry);
  }
  variables.push_back(nullptr);

  std::vector<Child> children;
  children.push_back(spawn([&] {
    ::execvpe(arguments[0], arguments.data(), variables.data());
    constexpr char kText[] = "cannot start the program\n";
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText, sizeof(kText) - 1);
  }));
  const WaitResult result = wait_all(children, timeout, /*stop_after_failure=*/false);
  ProcessResult process{children[0].exit_code, std::move(children[0].output)};
  if (result == WaitResult::kTimedOut) {
    process.output += "\n" + argv[0] + " was killed after " + std::to_string(timeout.count()) + " s\n";
  }
  return process;
}

ProcessResult run_python_ranks(int num_ranks, const std::string& script, const std::vector<std::string>& args,
                               std::chrono::seconds timeout) {
  std::vector<std::string> argv = {python(),           "-m",        "torch.distributed.run", "--standalone",
                                   "--local-addr",     "127.0.0.1", "--nproc-per-node",      std::to_string(num_ranks),
                                   script_path(script)};
  argv.insert(argv.end(), args.begin(), args.end());
  return run_process(argv, kPythonEnvironment, timeout);
}

ProcessResult run_python(const std::string& script, const std::vector<std::string>& args,
                         std::chrono::seconds timeout) {
  std::vector<std::string> argv = {python(), script_path(script)};
  argv.insert(argv.end(), args.begin(), args.end());
  return run_process(argv, kPythonEnvironment, timeout);
}

TempDir::TempDir() : owner_(::getpid()) {
  path_ = (std::filesystem::temp_directory_path() / "fsdp2-test-XXXXXX").string();
  if (::mkdtemp(path_.data()) == nullptr) throw_errno("mkdtemp");
}

TempDir::~TempDir() {
  if (::getpid() != owner_) return;
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string test_file(const std::string& relative) { return std::string(FSDP2_TEST_SOURCE_DIR) + "/" + relative; }

std::string build_folder() { return FSDP2_TEST_BINARY_DIR; }

}  // namespace fsdp2::testing
