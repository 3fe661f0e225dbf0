#include "checkpoint/progress.h"

#include <unistd.h>

#include <cstdio>

#include "checkpoint/text.h"

namespace fsdp2::tool {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(100);
constexpr int kWidth = 30;

}  // namespace

Progress::Progress() : terminal_(isatty(STDERR_FILENO) == 1) {}
Progress::~Progress() {
  if (terminal_ && !phase_.empty()) std::fputs("\r\033[K", stderr);
}

void Progress::update(const std::string& phase, uint64_t done, uint64_t total) {
  const auto now = Clock::now();
  if (phase != phase_) {
    phase_ = phase;
    started_ = now;
    if (!terminal_) std::fprintf(stderr, "%s %s\n", phase.c_str(), bytes_text(total).c_str());
  } else if (now - drawn_ < kInterval && done < total) {
    return;
  }
  drawn_ = now;
  if (terminal_) draw(done, total);
}

void Progress::draw(uint64_t done, uint64_t total) {
  const double share = total == 0 ? 1 : static_cast<double>(done) / static_cast<double>(total);
  const double seconds = std::chrono::duration<double>(drawn_ - started_).count();
  const auto filled = static_cast<size_t>(share * kWidth);
  const std::string bar = std::string(filled, '#') + std::string(kWidth - filled, '.');
  const double speed = seconds > 0.5 ? static_cast<double>(done) / seconds : 0;
  std::fprintf(stderr, "\r\033[K%s [%s] %3.0f %%  %s of %s", phase_.c_str(), bar.c_str(), share * 100,
               bytes_text(done).c_str(), bytes_text(total).c_str());
  if (speed > 0) std::fprintf(stderr, "  %s/s", bytes_text(static_cast<uint64_t>(speed)).c_str());
  std::fflush(stderr);
}

}  // namespace fsdp2::tool
