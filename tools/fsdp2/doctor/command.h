#pragma once

// `fsdp2 doctor`: what this machine offers to a training job, and what is wrong with it.

#include <CLI/CLI.hpp>

#include "doctor/topic.h"

namespace fsdp2::tool {

/// Adds the subcommand.
class DoctorCommand {
 public:
  explicit DoctorCommand(CLI::App& program);
  bool chosen() const { return app_->parsed(); }
  /// After CLI11 has parsed: 1 where there is a finding of severity error, else 0.
  int run() const;

 private:
  CLI::App* app_;
  DoctorOptions options_;
  bool json_ = false, quick_ = false, worker_ = false;
};

}  // namespace fsdp2::tool
