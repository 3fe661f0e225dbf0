#pragma once

// Starts `fsdp2 run` as a user does, and looks at what it leaves behind.

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/ranks.h"

namespace fsdp2::testing {

using Clock = std::chrono::steady_clock;

/// Path of the program under test.
std::string fsdp2_program();

/// One running `fsdp2 run ...`, its output collected as it comes. Killed when the object dies.
class Launch {
 public:
  /// `arguments` follow "fsdp2 run"; `environment` entries "NAME=value" replace ours, "NAME" alone
  /// removes.
  explicit Launch(const std::vector<std::string>& arguments, const std::vector<std::string>& environment = {});
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  pid_t pid() const { return pid_; }
  /// Reads until `text` was printed on either stream; false after `seconds` or at the end of the
  /// output.
  bool wait_for_output(const std::string& text, double seconds = 30);
  /// Waits for the end; exit code, 128 + signal number, or -1 after `seconds`.
  int wait(double seconds = 60);
  const std::string& out() const { return text_[0]; }
  const std::string& err() const { return text_[1]; }
  std::vector<std::string> err_lines() const;

 private:
  bool read_some(int milliseconds);
  pid_t pid_ = -1;
  int fds_[2] = {-1, -1};
  std::string text_[2];
  int code_ = -1;
};

/// A shell command that each rank runs: {"sh", "-c", command}.
std::vector<std::string> shell(std::vector<std::string> options, const std::string& command);

/// Processes, zombies excluded, whose environment holds `entry`.
std::vector<pid_t> processes_with(const std::string& entry);
/// True when no such process is left within `seconds`.
bool none_left(const std::string& entry, double seconds);
/// The value after "NAME=" in a text of lines.
std::string value_of(const std::string& text, const std::string& name);

inline Clock::time_point in(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

inline std::string fsdp2_program() {
  const char* chosen = getenv("FSDP2_PROGRAM");
  if (chosen) return chosen;
  // This test is <build>/tests/..., the program <build>/bin/fsdp2.
  return std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() / "bin" / "fsdp2";
}

inline Launch::Launch(const std::vector<std::string>& arguments, const std::vector<std::string>& environment) {
  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
  std::vector<std::string> words = {fsdp2_program(), "run"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ == 0) {
    dup2(out[1], STDOUT_FILENO);
    dup2(err[1], STDERR_FILENO);
    for (const auto& entry : environment) {
      auto equals = entry.find('=');
      if (equals == std::string::npos) {
        unsetenv(entry.c_str());
      } else {
        setenv(entry.substr(0, equals).c_str(), entry.c_str() + equals + 1, 1);
      }
    }
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(out[1]);
  close(err[1]);
  fds_[0] = out[0];
  fds_[1] = err[0];
}

inline Launch::~Launch() {
  if (code_ < 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  for (int fd : fds_) {
    if (fd >= 0) close(fd);
  }
}

inline bool Launch::read_some(int milliseconds) {
  pollfd ready[2] = {{fds_[0], POLLIN, 0}, {fds_[1], POLLIN, 0}};
  if (fds_[0] < 0 && fds_[1] < 0) return false;
  poll(ready, 2, milliseconds);
  for (int i = 0; i < 2; ++i) {
    if (!ready[i].revents) continue;
    char buffer[65536];
    ssize_t got = read(fds_[i], buffer, sizeof(buffer));
    if (got > 0) {
      text_[i].append(buffer, got);
    } else if (got == 0 || errno != EINTR) {
      close(fds_[i]);
      fds_[i] = -1;
    }
  }
  return true;
}

inline bool Launch::wait_for_output(const std::string& text, double seconds) {
  auto deadline = in(seconds);
  auto seen = [&] { return text_[0].find(text) != std::string::npos || text_[1].find(text) != std::string::npos; };
  while (!seen() && Clock::now() < deadline && read_some(50)) {
  }
  return seen();
}

inline int Launch::wait(double seconds) {
  auto deadline = in(seconds);
  while (Clock::now() < deadline && read_some(50)) {
  }
  while (code_ < 0) {
    int status = 0;
    pid_t got = waitpid(pid_, &status, WNOHANG);
    if (got == pid_) code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (got == pid_ || Clock::now() >= deadline) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return code_;
}

inline std::vector<std::string> Launch::err_lines() const {
  std::vector<std::string> lines;
  std::istringstream stream(err());
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

inline std::vector<std::string> shell(std::vector<std::string> options, const std::string& command) {
  options.insert(options.end(), {"sh", "-c", command});
  return options;
}

inline std::vector<pid_t> processes_with(const std::string& entry) {
  std::vector<pid_t> found;
  DIR* proc = opendir("/proc");
  while (dirent* folder = readdir(proc)) {
    pid_t pid = static_cast<pid_t>(atol(folder->d_name));
    // A zombie's environment is empty, so it is not found.
    if (pid > 0 && read_file("/proc/" + std::to_string(pid) + "/environ").find(entry) != std::string::npos) {
      found.push_back(pid);
    }
  }
  closedir(proc);
  return found;
}

inline bool none_left(const std::string& entry, double seconds) {
  auto deadline = in(seconds);
  while (!processes_with(entry).empty()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return true;
}

inline std::string value_of(const std::string& text, const std::string& name) {
  auto at = text.find(name + "=");
  if (at == std::string::npos) return "";
  at += name.size() + 1;
  return text.substr(at, text.find('\n', at) - at);
}

}  // namespace fsdp2::testing
