#pragma once

// How far something long is, on stderr: a bar where that is a terminal, one line for each phase elsewhere.

#include <chrono>
#include <cstdint>
#include <string>

namespace fsdp2::tool {

class Progress {
 public:
  Progress();
  /// Ends the line.
  ~Progress();
  Progress(const Progress&) = delete;
  void update(const std::string& phase, uint64_t done, uint64_t total);

 private:
  using Clock = std::chrono::steady_clock;
  void draw(uint64_t done, uint64_t total);
  bool terminal_;
  std::string phase_;
  Clock::time_point started_, drawn_;
};

}  // namespace fsdp2::tool
