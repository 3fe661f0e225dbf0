#include "progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include <fsdp2/error.h>

namespace llama {
namespace {

double status_mib(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::strtod(line.c_str() + field.size() + 1, nullptr) / 1024.0;
  }
  return 0;
}

std::string clock_text(double seconds) {
  char text[32];
  auto whole = static_cast<long>(seconds + 0.5);
  std::snprintf(text, sizeof(text), "%ld:%02ld", whole / 60, whole % 60);
  return text;
}

}  // namespace

double resident_mib() { return status_mib("VmRSS"); }
double peak_resident_mib() { return status_mib("VmHWM"); }

Progress::Progress(bool visible, const std::string& json_path, int64_t first_step, int64_t last_step, int64_t every)
    : visible_(visible),
      terminal_(isatty(STDERR_FILENO) == 1),
      first_step_(first_step),
      last_step_(last_step),
      every_(std::max<int64_t>(every, 1)),
      last_time_(Clock::now()) {
  if (!visible_ || json_path.empty()) return;
  json_.open(json_path);
  FSDP2_CHECK(json_, kIo, "[train] cannot write ", json_path, "; give another file with --log");
}

Progress::~Progress() { clear_bar(); }

void Progress::clear_bar() {
  if (bar_shown_) std::fputs("\r\033[K", stderr);
  bar_shown_ = false;
}

void Progress::event(const std::string& text, const nlohmann::json& object) {
  if (!visible_) return;
  clear_bar();
  std::fprintf(stderr, "%s\n", text.c_str());
  if (json_.is_open()) json_ << object.dump() << std::endl;
}

void Progress::step(int64_t step, double loss, double gradient_norm, int64_t tokens) {
  auto now = Clock::now();
  double seconds = std::chrono::duration<double>(now - last_time_).count();
  last_time_ = now;
  // The first step also allocates and connects: it says little about the others.
  bool first = step == first_step_;
  seconds_per_step_ = first || seconds_per_step_ == 0 ? seconds : 0.9 * seconds_per_step_ + 0.1 * seconds;
  if (!visible_) return;
  double rate = static_cast<double>(tokens) / seconds_per_step_;
  if (json_.is_open()) {
    json_ << nlohmann::json{{"event", "step"},
                            {"step", step},
                            {"loss", loss},
                            {"gradient_norm", gradient_norm},
                            {"tokens_per_second", rate},
                            {"resident_mib", resident_mib()}}
                 .dump()
          << std::endl;
  }
  char text[160];
  std::snprintf(text, sizeof(text), "step %ld/%ld  loss %.4f  %.0f tokens/s  %.0f MiB  ETA %s", static_cast<long>(step),
                static_cast<long>(last_step_), loss, rate, resident_mib(),
                clock_text(seconds_per_step_ * static_cast<double>(last_step_ - step)).c_str());
  if (terminal_) {
    constexpr int kWidth = 24;
    auto done = static_cast<int>(kWidth * (step - first_step_ + 1) / (last_step_ - first_step_ + 1));
    std::string bar = std::string(done, '#') + std::string(kWidth - done, '.');
    std::fprintf(stderr, "\r\033[K[%s] %s", bar.c_str(), text);
    std::fflush(stderr);
    bar_shown_ = true;
  } else if (first || step == last_step_ || step % every_ == 0) {
    std::fprintf(stderr, "%s\n", text);
  }
  if (first) seconds_per_step_ = 0;
}

}  // namespace llama
