#include "exit_report.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include <nlohmann/json.hpp>

namespace fsdp2::tool {
namespace {

struct ErrorFile {
  std::string message;
  double time = 1e300;
};

/// What the rank itself wrote to TORCHELASTIC_ERROR_FILE, if anything (Python's @record does).
ErrorFile read_error_file(const std::string& path) {
  ErrorFile out;
  std::ifstream file(path);
  if (!file) return out;
  auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("message")) return out;
  const auto& message = json["message"];
  if (message.is_string()) out.message = message.get<std::string>();
  if (!message.is_object()) return out;
  if (message.contains("message") && message["message"].is_string()) {
    out.message = message["message"].get<std::string>();
  }
  if (!message.contains("extraInfo") || !message["extraInfo"].is_object()) return out;
  const auto& time = message["extraInfo"].value("timestamp", nlohmann::json());
  if (time.is_number()) out.time = time.get<double>();
  if (time.is_string()) out.time = std::strtod(time.get<std::string>().c_str(), nullptr);
  return out;
}

bool failed(const Worker& worker) { return worker.ended && worker.ended->exit_code() != 0; }

std::string shortened(const std::string& text, size_t width) {
  auto line = text.substr(0, text.find('\n'));
  return line.size() <= width ? line : line.substr(0, width - 3) + "...";
}

std::string padded(std::string text, size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

std::string row(const std::string& rank, const std::string& local_rank, const std::string& pid,
                const std::string& ended, const std::string& text) {
  return "  " + padded(rank, 6) + padded(local_rank, 7) + padded(pid, 9) + padded(ended, 19) + text;
}

std::string how_it_ended(const Worker& worker) {
  if (!worker.ended) return "not to be killed";
  return worker.ended->text() + (worker.told_to_stop ? " (stopped)" : "");
}

}  // namespace

std::optional<size_t> root_cause(const std::vector<RankReport>& ranks) {
  std::optional<size_t> best;
  auto key = [&](size_t index) {
    const auto& worker = ranks[index].worker;
    return std::tuple(worker.told_to_stop, worker.ended_at, read_error_file(worker.error_file).time,
                      !worker.ended->by_signal, worker.rank);
  };
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (failed(ranks[i].worker) && (!best || key(i) < key(*best))) best = i;
  }
  return best;
}

std::vector<std::string> exit_report(const std::vector<RankReport>& ranks, size_t root, double seconds) {
  std::vector<size_t> order;
  int num_failed = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    bool own_failure = failed(ranks[i].worker) && !ranks[i].worker.told_to_stop;
    num_failed += own_failure;
    if (i != root && (ranks.size() <= 16 || own_failure)) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return ranks[a].worker.rank < ranks[b].worker.rank; });
  order.push_back(root);
  std::vector<std::string> lines;
  lines.push_back("fsdp2 run: " + std::to_string(std::max(num_failed, 1)) + " of " + std::to_string(ranks.size()) +
                  " ranks on this node failed; the root cause comes last");
  lines.push_back(row("rank", "local", "pid", "ended with", "last line on stderr"));
  for (size_t index : order) {
    const auto& worker = ranks[index].worker;
    lines.push_back(row(std::to_string(worker.rank), std::to_string(worker.local_rank), std::to_string(worker.pid),
                        how_it_ended(worker), shortened(ranks[index].last_line, 100)));
  }
  char host[256] = "?";
  gethostname(host, sizeof(host) - 1);
  char after[32];
  std::snprintf(after, sizeof(after), "%.1f s", seconds);
  const auto& cause = ranks[root].worker;
  auto message = read_error_file(cause.error_file).message;
  if (message.empty()) message = ranks[root].last_line;
  lines.push_back("fsdp2 run: root cause: rank " + std::to_string(cause.rank) + " (pid " + std::to_string(cause.pid) +
                  " on " + host + ") ended with " + cause.ended->text() + " after " + after +
                  (message.empty() ? "" : ": " + shortened(message, 400)));
  return lines;
}

}  // namespace fsdp2::tool
