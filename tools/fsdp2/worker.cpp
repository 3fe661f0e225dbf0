#include "worker.h"

#include <fcntl.h>
#include <pty.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>

#include <fsdp2/error.h>

#include "signal_names.h"

namespace fsdp2::tool {
namespace {

struct Channel {
  int ours = -1, theirs = -1;
};

Channel open_channel(bool terminal, int our_terminal) {
  Channel channel;
  if (terminal) {
    winsize size{};
    ioctl(our_terminal, TIOCGWINSZ, &size);
    termios settings{};
    if (tcgetattr(our_terminal, &settings) == 0 &&
        openpty(&channel.ours, &channel.theirs, nullptr, &settings, &size) == 0) {
      cfmakeraw(&settings);  // bytes pass unchanged; the real terminal does the rest
      tcsetattr(channel.theirs, TCSANOW, &settings);
      fcntl(channel.ours, F_SETFD, FD_CLOEXEC);
      fcntl(channel.theirs, F_SETFD, FD_CLOEXEC);
      fcntl(channel.ours, F_SETFL, O_NONBLOCK);
      return channel;
    }
  }
  int fds[2];
  FSDP2_CHECK(pipe2(fds, O_CLOEXEC) == 0, kIo, "[run] cannot make a pipe for a rank's output: ", strerror(errno),
              "; raise the limit of open files (ulimit -n)");
  fcntl(fds[0], F_SETFL, O_NONBLOCK);
  return {fds[0], fds[1]};
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> out;
  for (const auto& string : strings) out.push_back(const_cast<char*>(string.c_str()));
  out.push_back(nullptr);
  return out;
}

}  // namespace

std::string Ended::text() const { return by_signal ? signal_name(number) : "code " + std::to_string(number); }

Worker start_worker(const WorkerStart& start) {
  auto out = open_channel(start.terminal_out, STDOUT_FILENO);
  auto err = open_channel(start.terminal_err, STDERR_FILENO);
  int failure[2];
  FSDP2_CHECK(pipe2(failure, O_CLOEXEC) == 0, kIo, "[run] cannot make a pipe: ", strerror(errno));
  auto argv = pointers(start.command);
  auto environment = pointers(start.environment);
  pid_t launcher = getpid();

  // The launcher has threads by now: the child calls only functions that are safe after such a
  // fork.
  pid_t pid = fork();
  if (pid == 0) {
    setsid();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != launcher) _exit(1);  // it died before the line above
    sigset_t none;
    sigemptyset(&none);
    for (int signal_number = 1; signal_number < NSIG; ++signal_number) signal(signal_number, SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    if (!start.keeps_stdin) dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
    dup2(out.theirs, STDOUT_FILENO);
    dup2(err.theirs, STDERR_FILENO);
    if (close_range(3, ~0U, CLOSE_RANGE_CLOEXEC) != 0) {
      for (int fd = 3; fd < 4096; ++fd) fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
    execve(argv[0], argv.data(), environment.data());
    int cause = errno;
    if (write(failure[1], &cause, sizeof(cause)) < 0) _exit(126);
    _exit(127);
  }
  int fork_error = errno;
  for (int fd : {out.theirs, err.theirs, failure[1]}) close(fd);
  int cause = 0;
  ssize_t got = -1;
  while (pid > 0 && (got = read(failure[0], &cause, sizeof(cause))) < 0 && errno == EINTR) {
  }
  close(failure[0]);
  if (pid < 0 || got == sizeof(cause)) {
    close(out.ours);
    close(err.ours);
    if (pid > 0) waitpid(pid, nullptr, 0);
    FSDP2_CHECK(pid > 0, kIo, "[run] cannot start another process: ", strerror(fork_error),
                "; raise the limit of processes (ulimit -u) or start fewer ranks");
    FSDP2_THROW(kIo, "[run] cannot execute ", start.command.front(), ": ", strerror(cause),
                cause == ENOEXEC ? "; a script needs a first line such as #!/bin/sh" : "");
  }
  Worker worker;
  worker.pid = pid;
  worker.out_fd = out.ours;
  worker.err_fd = err.ours;
  return worker;
}

}  // namespace fsdp2::tool
