// How fast ranks of this machine exchange data, and whether they can at all: N of them, started as users start theirs.

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>

#include "checkpoint/text.h"
#include "doctor/host.h"
#include "doctor/topic.h"
#include "worker.h"

namespace fsdp2::tool {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kSlow = 0.2;  // GB/s of an all-gather where each rank has a core

struct Outcome {
  std::string out, err;
  int code = 0;
  bool late = false;
};

/// Ours, without what would steer the launcher. The ranks use the processor only.
std::vector<std::string> environment() {
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!text.starts_with("PET_") && !text.starts_with("CUDA_VISIBLE_DEVICES=") &&
        !text.starts_with("OMP_NUM_THREADS=")) {
      out.push_back(text);
    }
  }
  out.insert(out.end(), {"CUDA_VISIBLE_DEVICES=", "OMP_NUM_THREADS=1"});
  return out;
}

/// Reads what is there; false at the end.
bool pump(int fd, std::string& text) {
  char buffer[4096];
  const ssize_t got = read(fd, buffer, sizeof(buffer));
  if (got > 0) text.append(buffer, static_cast<size_t>(got));
  return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
}

Outcome launch(int num_ranks) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  WorkerStart start;
  start.command = {program,
                   "run",
                   "--standalone",
                   "--rdzv-conf",
                   "join_timeout=15",
                   "--nproc-per-node",
                   std::to_string(num_ranks),
                   "--no-prefix",
                   program,
                   "doctor",
                   "--worker"};
  start.environment = environment();
  // Dies with us, and its watchdog then ends its ranks.
  Worker worker = start_worker(start);
  Outcome outcome;
  const auto deadline = Clock::now() + std::chrono::seconds(40 + num_ranks);
  bool out_open = true, err_open = true;
  while (out_open || err_open) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0 && !outcome.late) {
      outcome.late = true;
      kill(worker.pid, SIGTERM);  // it ends its ranks, and closes the pipes
    }
    pollfd fds[] = {{out_open ? worker.out_fd : -1, POLLIN, 0}, {err_open ? worker.err_fd : -1, POLLIN, 0}};
    poll(fds, 2, outcome.late ? 1000 : static_cast<int>(left));
    if (fds[0].revents != 0) out_open = pump(worker.out_fd, outcome.out);
    if (fds[1].revents != 0) err_open = pump(worker.err_fd, outcome.err);
  }
  close(worker.out_fd);
  close(worker.err_fd);
  int status = 0;
  while (waitpid(worker.pid, &status, 0) < 0 && errno == EINTR) {
  }
  outcome.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return outcome;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    if (end > begin) lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

/// The first line in which a rank or the launcher says why, else the last one that is not of a backtrace.
std::string cause(const std::string& err) {
  std::string last = "no rank said why";
  for (const std::string& line : lines_of(err)) {
    if (line.find("fsdp2: ") != std::string::npos) return line;
    if (!line.starts_with("frame #") && !line.starts_with("Exception raised")) last = line;
  }
  return last;
}

std::string speed_text(const Json& line) {
  char text[120];
  std::snprintf(text, sizeof(text), "all-reduce of 4 B %.1f us, 16 MiB: all-gather %.2f GB/s, reduce-scatter %.2f GB/s",
                line["latency_us"].get<double>(), line["all_gather_gb_s"].get<double>(),
                line["reduce_scatter_gb_s"].get<double>());
  return text;
}

void show(const Json& line, const DoctorOptions& options, Topic& topic) {
  const std::string backend = line["backend"].get<std::string>();
  if (line.contains("error")) {
    const std::string why = line["error"].get<std::string>();
    topic.fact(backend, {{"error", why}}, backend, "failed");
    const bool shm = backend == "shm";
    topic.find(shm ? Severity::kWarning : Severity::kError, "collectives-failed",
               "ranks of this machine cannot use " + backend + ": " + why,
               shm ? "mend what the text says; until then ranks use Gloo" : "mend what the text says");
    return;
  }
  Json facts = line;
  facts.erase("backend");
  topic.fact(backend, facts, backend, speed_text(line));
  if (line["all_gather_gb_s"].get<double>() < kSlow && options.num_ranks <= cores().usable) {
    topic.find(Severity::kWarning, "collectives-slow", backend + ": " + speed_text(line),
               "look for other programs on these cores (top), and for cores of two sockets or a throttled container");
  }
}

}  // namespace

void check_collectives(const DoctorOptions& options, Topic& topic) {
  topic.fact("measured", options.benchmarks);
  if (!options.benchmarks) return;
  const Outcome outcome = launch(options.num_ranks);
  std::string missing = "shm gloo";
  for (const std::string& text : lines_of(outcome.out)) {
    const Json line = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!line.is_object() || !line.contains("backend")) continue;
    show(line, options, topic);
    missing = line["backend"] == "shm" ? "gloo" : "";
  }
  if (missing.empty()) return;
  topic.find(Severity::kError, "collectives-failed",
             count_text(static_cast<size_t>(options.num_ranks), "rank") +
                 " started by fsdp2 run did not get through (" + missing +
                 "): " + (outcome.late ? "not done in time" : "exit code " + std::to_string(outcome.code)) + "; " +
                 cause(outcome.err),
             "mend what the text says; fsdp2 run --nproc-per-node " + std::to_string(options.num_ranks) +
                 " with a small program shows all of it");
}

}  // namespace fsdp2::tool
