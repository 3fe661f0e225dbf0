#pragma once

// `fsdp2 checkpoint`: looks at checkpoints, and turns one format into another.

#include <CLI/CLI.hpp>

#include <functional>
#include <string>
#include <vector>

namespace fsdp2::tool {

/// Adds the subcommand and those below it.
class CheckpointCommand {
 public:
  explicit CheckpointCommand(CLI::App& program);
  bool chosen() const { return app_->parsed(); }
  /// kInvalidArgument unless there is a subcommand of that name.
  void check_name(const std::string& name) const;
  /// After CLI11 has parsed: the exit code. Throws fsdp2::Error.
  int run() const;

  struct Subcommand {
    CLI::App* app;
    std::function<int()> run;
  };

 private:
  CLI::App* app_;
  std::vector<Subcommand> subcommands_;
};

CheckpointCommand::Subcommand add_inspect(CLI::App& parent);
CheckpointCommand::Subcommand add_verify(CLI::App& parent);
CheckpointCommand::Subcommand add_convert(CLI::App& parent);
CheckpointCommand::Subcommand add_reshard(CLI::App& parent);

}  // namespace fsdp2::tool
