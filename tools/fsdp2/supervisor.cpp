#include "supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <thread>

#include <fsdp2/error.h>

#include "process_sweep.h"
#include "signal_names.h"

namespace fsdp2::tool {
namespace {

int signal_pipe[2] = {-1, -1};

void on_signal(int signal_number) {
  int saved = errno;
  auto byte = static_cast<unsigned char>(signal_number);
  // The pipe is full only when thousands of signals wait already.
  [[maybe_unused]] auto wrote = write(signal_pipe[1], &byte, 1);
  errno = saved;
}

constexpr double kUnkillableSeconds = 5.0;  // how long a killed process may stay, e.g. in a hanging file system

}  // namespace

Supervisor::Supervisor(const RunOptions& options, const JobShape& job, Rendezvous& rendezvous, pid_t watchdog)
    : options_(options), job_(job), rendezvous_(rendezvous), watchdog_(watchdog) {
  FSDP2_CHECK(pipe2(signal_pipe, O_CLOEXEC | O_NONBLOCK) == 0, kIo, "[run] cannot make a pipe: ", strerror(errno));
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  for (int signal_number : options.signals) {
    struct sigaction inherited {};
    sigaction(signal_number, nullptr, &inherited);
    // Under nohup a hang-up stays ignored.
    if (signal_number == SIGHUP && inherited.sa_handler == SIG_IGN) continue;
    sigaction(signal_number, &action, nullptr);
  }
  sigaction(SIGCHLD, &action, nullptr);
  signal(SIGPIPE, SIG_IGN);
  // Orphans of the ranks become our children: found when the run ends, and never zombies.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
}

Supervisor::~Supervisor() {
  // Only when something above threw: a normal run has ended everything by now.
  kill_run_processes(job_.unique_id, getpid(), {watchdog_}, 2.0);
}

void Supervisor::note(const std::string& text) { stderr_.line("", "fsdp2 run: " + text); }

OutputQueue& Supervisor::out_console() {
  // On one terminal the two streams share it line by line, or a line would land in the other's
  // progress bar.
  return stdout_.is_terminal() && stderr_.is_terminal() ? stderr_ : stdout_;
}

void Supervisor::start_ranks() {
  if (options_.num_local_ranks > 1 && !getenv("OMP_NUM_THREADS")) {
    note("OMP_NUM_THREADS is not set: each of the " + std::to_string(options_.num_local_ranks) +
         " ranks gets 1 thread; set it to choose");
  }
  for (int local_rank = 0; local_rank < options_.num_local_ranks; ++local_rank) {
    auto folder = rank_folder(job_, local_rank);
    std::filesystem::create_directories(folder);
    WorkerStart start;
    start.command = options_.command;
    start.environment = merged_environment(rank_variables(options_, job_, local_rank));
    start.keeps_stdin = local_rank == 0;
    start.terminal_out = stdout_.is_terminal();
    start.terminal_err = stderr_.is_terminal();
    Rank rank;
    rank.worker = start_worker(start);
    rank.worker.local_rank = local_rank;
    rank.worker.rank = job_.first_rank + local_rank;
    rank.worker.error_file = folder + "/error.json";
    auto prefix = line_prefix(options_, job_, local_rank);
    bool shown = options_.shown_local_ranks.count(local_rank) > 0;
    auto redirect = options_.redirects[local_rank], tee = options_.tee[local_rank];
    auto stream = [&](int fd, OutputQueue& console, bool redirected, bool teed, const char* file) {
      return std::make_unique<RankStream>(fd, prefix, shown && !redirected ? &console : nullptr,
                                          redirected || teed ? folder + file : "");
    };
    rank.out = stream(rank.worker.out_fd, out_console(), redirect.out && !tee.out, tee.out, "/stdout.log");
    rank.err = stream(rank.worker.err_fd, stderr_, redirect.err && !tee.err, tee.err, "/stderr.log");
    ranks_.push_back(std::move(rank));
  }
}

bool Supervisor::all_ended() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.worker.ended.has_value(); });
}

void Supervisor::wait_for_event() {
  std::vector<pollfd> fds{{signal_pipe[0], POLLIN, 0}};
  for (auto* queue : {&stdout_, &stderr_}) {
    if (!queue->empty()) fds.push_back({queue->fd(), POLLOUT, 0});
  }
  std::vector<RankStream*> readable(fds.size(), nullptr);
  for (auto& rank : ranks_) {
    for (auto* stream : {rank.out.get(), rank.err.get()}) {
      if (!stream->open() || (stream->console() && stream->console()->full())) continue;
      fds.push_back({stream->fd(), POLLIN, 0});
      readable.push_back(stream);
    }
  }
  int timeout = -1;
  auto wake_at = [&](Clock::time_point when) {
    auto left = std::chrono::ceil<std::chrono::milliseconds>(when - Clock::now()).count();
    left = std::clamp<int64_t>(left, 0, 60'000);
    timeout = timeout < 0 ? static_cast<int>(left) : std::min(timeout, static_cast<int>(left));
  };
  if (kill_at_) wake_at(*kill_at_);
  if (give_up_at_) wake_at(*give_up_at_);
  if (options_.num_nodes > 1) wake_at(next_node_check_);
  if (poll(fds.data(), fds.size(), timeout) > 0) {
    for (size_t i = 0; i < fds.size(); ++i) {
      if (readable[i] && fds[i].revents) readable[i]->pump();
    }
  }
  stdout_.flush_some();
  stderr_.flush_some();
}

void Supervisor::handle_signals() {
  unsigned char numbers[64];
  ssize_t got = read(signal_pipe[0], numbers, sizeof(numbers));
  for (ssize_t i = 0; i < got; ++i) {
    int number = numbers[i];
    if (number == SIGCHLD) continue;
    bool ends_the_job = number == SIGTERM || number == SIGINT || number == SIGHUP || number == SIGQUIT;
    if (!ends_the_job) {
      for (auto& rank : ranks_) {
        if (!rank.worker.ended) kill(rank.worker.pid, number);
      }
    } else if (!kill_at_ && !give_up_at_) {
      note("got " + signal_name(number) + ": passing it on, SIGKILL follows in " + c10::str(options_.shutdown_timeout) +
           " s");
      stop_reason_ = signal_name(number) + " came from outside";
      stop(number);
    } else if (kill_at_ && number == SIGINT) {
      kill_at_ = Clock::now();  // the second Ctrl-C
    }
  }
}

void Supervisor::reap() {
  int status = 0;
  std::optional<Worker> first_failure;
  auto now = Clock::now();
  for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
    if (pid == watchdog_) note("its watchdog was killed: after a SIGKILL of this launcher, daemons could stay");
    for (auto& rank : ranks_) {
      if (rank.worker.pid != pid || rank.worker.ended) continue;
      rank.worker.ended = WIFSIGNALED(status) ? Ended{true, WTERMSIG(status)} : Ended{false, WEXITSTATUS(status)};
      rank.worker.ended_at = now;
      rank.worker.told_to_stop = kill_at_.has_value() || give_up_at_.has_value();
      if (rank.worker.ended->exit_code() != 0 && !first_failure) first_failure = rank.worker;
    }
  }
  if (!first_failure || kill_at_ || give_up_at_) return;
  rendezvous_.publish_failure("rank " + std::to_string(first_failure->rank) + " on node " +
                              std::to_string(options_.node_rank) + " ended with " + first_failure->ended->text());
  if (!all_ended()) {
    note("rank " + std::to_string(first_failure->rank) + " ended with " + first_failure->ended->text() +
         "; stopping the others");
  }
  stop(SIGTERM);
}

void Supervisor::check_other_nodes() {
  if (options_.num_nodes == 1 || Clock::now() < next_node_check_ || kill_at_ || give_up_at_) return;
  next_node_check_ = Clock::now() + std::chrono::seconds(1);
  auto failure = rendezvous_.failure_elsewhere();
  if (!failure) return;
  note(*failure + "; stopping the ranks of this node");
  stop_reason_ = *failure;
  stop(SIGTERM);
}

std::set<pid_t> Supervisor::spared() const { return {watchdog_}; }

void Supervisor::signal_everything(int signal_number) {
  std::set<pid_t> done;
  for (auto& rank : ranks_) {
    if (rank.worker.ended) continue;
    kill(-rank.worker.pid, signal_number);
    done.insert(rank.worker.pid);
  }
  // What left its rank's process group is found by the run's id. Members of the group may get the
  // signal twice.
  done.insert(watchdog_);
  for (pid_t pid : find_run_processes(job_.unique_id, getpid(), done)) {
    bool in_a_group = done.count(getpgid(pid)) > 0;
    if (!in_a_group) kill(pid, signal_number);
  }
}

void Supervisor::stop(int signal_number) {
  kill_at_ = Clock::now() +
             std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.shutdown_timeout));
  signal_everything(signal_number);
}

void Supervisor::advance_shutdown() {
  auto now = Clock::now();
  if (kill_at_ && now >= *kill_at_) {
    kill_at_.reset();
    give_up_at_ = now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(kUnkillableSeconds));
    signal_everything(SIGKILL);
  } else if (give_up_at_ && now >= *give_up_at_) {
    gave_up_ = true;
  }
}

void Supervisor::end_leftovers() {
  auto leftovers = find_run_processes(job_.unique_id, getpid(), spared());
  if (leftovers.empty()) return;
  // Asked once already when the job was being stopped; then what is left of the time counts.
  auto until = kill_at_.value_or(Clock::now());
  if (!kill_at_ && !give_up_at_) {
    until += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.shutdown_timeout));
    for (pid_t pid : leftovers) kill(pid, SIGTERM);
  }
  while (Clock::now() < until && !leftovers.empty()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    while (waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    leftovers = find_run_processes(job_.unique_id, getpid(), spared());
  }
  if (!kill_run_processes(job_.unique_id, getpid(), spared(), kUnkillableSeconds)) {
    for (pid_t pid : find_run_processes(job_.unique_id, getpid(), spared())) {
      note("a process of this run cannot be killed: pid " + std::to_string(pid));
    }
  }
}

int Supervisor::report() {
  std::vector<RankReport> reports;
  for (const auto& rank : ranks_) {
    reports.push_back({rank.worker, rank.err->last_line()});
    if (!rank.worker.ended) {
      note("rank " + std::to_string(rank.worker.rank) + " (pid " + std::to_string(rank.worker.pid) +
           ") cannot be killed; it may hang in the kernel, e.g. in a network file system");
    }
  }
  auto root = root_cause(reports);
  if (!root) return gave_up_ ? 128 + SIGKILL : 0;
  const auto& cause = reports[*root].worker;
  double seconds = std::chrono::duration<double>(cause.ended_at - started_).count();
  for (const auto& line : exit_report(reports, *root, seconds)) stderr_.line("", line);
  if (cause.told_to_stop && !stop_reason_.empty()) note("root cause: " + stop_reason_);
  return cause.ended->exit_code();
}

int Supervisor::run() {
  start_ranks();
  while (!all_ended() && !gave_up_) {
    wait_for_event();
    handle_signals();
    reap();
    check_other_nodes();
    advance_shutdown();
  }
  for (auto& rank : ranks_) {
    for (auto* stream : {rank.out.get(), rank.err.get()}) {
      // A daemon may hold the stream open for ever: take what is there, do not wait for its end.
      for (int i = 0; i < 64 && stream->open(); ++i) {
        stream->pump();
        (stream == rank.out.get() ? out_console() : stderr_).flush(0.1);
      }
      stream->finish();
    }
  }
  end_leftovers();
  int code = report();
  stdout_.flush(2.0);
  stderr_.flush(2.0);
  bool failed = code != 0 || !stop_reason_.empty();
  rendezvous_.leave(failed ? 5.0 : 300.0);
  return code;
}

}  // namespace fsdp2::tool
