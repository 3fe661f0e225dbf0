#pragma once

// The command line of `fsdp2 run`: torchrun's options, read from arguments and PET_* variables.

#include <CLI/CLI.hpp>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace fsdp2::tool {

/// Which output streams of a rank: torchrun's 0, 1, 2, 3.
struct StreamChoice {
  bool out = false, err = false;
};

struct RunOptions {
  std::vector<std::string> command;  // what each rank executes, resolved: {"/usr/bin/python3", "-u", "train.py"}
  int num_nodes = 1;
  int node_rank = 0;
  int num_local_ranks = 1;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;  // 0: a free one
  std::string run_id;   // --rdzv-id; empty: a fresh unique id
  std::string role = "default";
  std::string log_dir;
  std::vector<StreamChoice> redirects, tee;  // one per local rank
  std::set<int> shown_local_ranks;           // whose lines reach the console
  bool prefix = true;
  bool dry_run = false;
  std::vector<int> signals;
  double shutdown_timeout = 3.0;
  double join_timeout = 600.0;
};

/// Adds the subcommand. After CLI11 has parsed, `finish` checks the values and gives the options;
/// it throws fsdp2::Error (kInvalidArgument, kNotFound or kUnsupported) with the fix in its text.
class RunCommandLine {
 public:
  explicit RunCommandLine(CLI::App& program);
  ~RunCommandLine();
  bool chosen() const;
  RunOptions finish() const;

 private:
  struct Raw;
  CLI::App* app_;
  std::unique_ptr<Raw> raw_;
};

}  // namespace fsdp2::tool
