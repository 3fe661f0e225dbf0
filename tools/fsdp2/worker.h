#pragma once

// One rank as a process of its own session, with its output in our hands.

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace fsdp2::tool {

/// How a process ended, as waitpid says it.
struct Ended {
  bool by_signal = false;
  int number = 0;  // exit code or signal number
  int exit_code() const { return by_signal ? 128 + number : number; }
  std::string text() const;  // "code 3", "SIGSEGV"
};

struct Worker {
  int rank = 0, local_rank = 0;
  pid_t pid = -1;
  int out_fd = -1, err_fd = -1;  // our ends
  std::string error_file;
  std::optional<Ended> ended;
  std::chrono::steady_clock::time_point ended_at;
  bool told_to_stop = false;  // it ended after we asked for it
};

struct WorkerStart {
  std::vector<std::string> command;
  std::vector<std::string> environment;  // whole, "NAME=value"
  bool keeps_stdin = false;
  bool terminal_out = false,
       terminal_err = false;  // give the rank a pseudo terminal, as ours is one
};

/// Starts the process and returns when its program has been executed; throws fsdp2::Error when that
/// fails. The kernel kills it when the calling thread ends.
Worker start_worker(const WorkerStart& start);

}  // namespace fsdp2::tool
