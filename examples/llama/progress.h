#pragma once

// What a user sees of a run: a progress bar on a terminal, plain lines elsewhere, and a file of
// JSON lines.

#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>

#include <nlohmann/json.hpp>

namespace llama {

class Progress {
 public:
  /// `visible`: one process shows and writes; the others pass false. An empty path writes no file.
  Progress(bool visible, const std::string& json_path, int64_t first_step, int64_t last_step, int64_t every);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(int64_t step, double loss, double gradient_norm, int64_t tokens);
  /// A line for people, and an object for the file.
  void event(const std::string& text, const nlohmann::json& object);

 private:
  using Clock = std::chrono::steady_clock;
  void clear_bar();
  bool visible_, terminal_, bar_shown_ = false;
  std::ofstream json_;
  int64_t first_step_, last_step_, every_;
  Clock::time_point last_time_;
  double seconds_per_step_ = 0;
};

/// Resident memory of this process in MiB, now and at its peak.
double resident_mib();
double peak_resident_mib();

}  // namespace llama
