#include "process_sweep.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include <fsdp2/error.h>

namespace fsdp2::tool {
namespace {

/// Whole content of a small /proc file; empty when the process is gone or not ours.
std::string read_proc(const std::string& path) {
  std::string content;
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return content;
  char buffer[4096];
  ssize_t got;
  while ((got = read(fd, buffer, sizeof(buffer))) > 0) content.append(buffer, got);
  close(fd);
  return content;
}

bool carries(const std::string& environment, const std::string& unique_id) {
  for (size_t begin = 0; begin < environment.size();) {
    auto end = std::min(environment.find('\0', begin), environment.size());
    std::string_view entry(environment.data() + begin, end - begin);
    if ((entry.starts_with(kRunChainVariable) || entry.starts_with("TORCHELASTIC_RUN_ID=")) &&
        entry.find(unique_id) != std::string_view::npos) {
      return true;
    }
    begin = end + 1;
  }
  return false;
}

struct Stat {
  char state = 'Z';
  pid_t parent = 0;
};

Stat read_stat(const std::string& folder) {
  Stat stat;
  auto text = read_proc(folder + "/stat");
  auto close_paren = text.rfind(')');  // the name in front may hold anything
  if (close_paren != std::string::npos && close_paren + 4 < text.size()) {
    stat.state = text[close_paren + 2];
    stat.parent = static_cast<pid_t>(atol(text.c_str() + close_paren + 4));
  }
  return stat;
}

[[noreturn]] void watch(int alive_fd, const std::string& unique_id, const std::string& scratch_folder) {
  char byte;
  while (read(alive_fd, &byte, 1) < 0 && errno == EINTR) {
  }
  kill_run_processes(unique_id, 0, {}, 4.0);
  std::error_code ignored;
  if (!scratch_folder.empty()) std::filesystem::remove_all(scratch_folder, ignored);
  _exit(0);
}

}  // namespace

std::string make_unique_id() {
  unsigned char bytes[12];
  FSDP2_CHECK(getrandom(bytes, sizeof(bytes), 0) == sizeof(bytes), kIo,
              "[run] no random bytes from the kernel: ", strerror(errno));
  std::string id = "fsdp2-";
  for (unsigned char byte : bytes) {
    id += "0123456789abcdef"[byte >> 4];
    id += "0123456789abcdef"[byte & 15];
  }
  return id;
}

std::vector<pid_t> find_run_processes(const std::string& unique_id, pid_t adopter, const std::set<pid_t>& spared) {
  std::vector<pid_t> found;
  DIR* proc = opendir("/proc");
  if (!proc) return found;
  while (dirent* entry = readdir(proc)) {
    pid_t pid = static_cast<pid_t>(atol(entry->d_name));
    if (pid <= 1 || pid == getpid() || spared.count(pid)) continue;
    std::string folder = std::string("/proc/") + entry->d_name;
    auto stat = read_stat(folder);
    if (stat.state == 'Z' || stat.state == 'X') continue;
    bool adopted = adopter > 0 && stat.parent == adopter;
    if (adopted || carries(read_proc(folder + "/environ"), unique_id)) found.push_back(pid);
  }
  closedir(proc);
  return found;
}

bool kill_run_processes(const std::string& unique_id, pid_t adopter, const std::set<pid_t>& spared, double seconds) {
  using Clock = std::chrono::steady_clock;
  auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  // A process between fork and exec can hide from one scan, so nothing must be found three times in
  // a row.
  for (int clean_scans = 0; clean_scans < 3;) {
    auto found = find_run_processes(unique_id, adopter, spared);
    for (pid_t pid : found) kill(pid, SIGKILL);
    clean_scans = found.empty() ? clean_scans + 1 : 0;
    if (!found.empty() && Clock::now() > deadline) return false;
    if (adopter == getpid()) {
      while (waitpid(-1, nullptr, WNOHANG) > 0) {
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(found.empty() ? 10 : 30));
  }
  return true;
}

Watchdog::Watchdog(const std::string& unique_id, const std::string& scratch_folder, char** program_args) {
  int fds[2];
  FSDP2_CHECK(pipe2(fds, O_CLOEXEC) == 0, kIo, "[run] cannot make a pipe: ", strerror(errno));
  pid_ = fork();
  FSDP2_CHECK(pid_ >= 0, kIo, "[run] cannot start the watchdog process: ", strerror(errno));
  if (pid_ > 0) {
    close(fds[0]);
    alive_fd_ = fds[1];
    return;
  }
  setsid();
  for (int signal_number : {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGPIPE, SIGUSR1, SIGUSR2}) {
    signal(signal_number, SIG_IGN);
  }
  prctl(PR_SET_NAME, "watchdog");
  int last = 0;
  while (program_args[last + 1]) ++last;
  size_t room = program_args[last] + strlen(program_args[last]) - program_args[0];
  memset(program_args[0], 0, room);
  strncpy(program_args[0], "watchdog", room - 1);
  // Holding the launcher's output open would keep its reader waiting.
  int null_fd = open("/dev/null", O_RDWR);
  for (int fd = 0; fd < 3; ++fd) dup2(null_fd, fd);
  dup2(fds[0], 3);
  close_range(4, ~0U, 0);
  watch(3, unique_id, scratch_folder);
}

Watchdog::~Watchdog() {
  close(alive_fd_);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace fsdp2::tool
