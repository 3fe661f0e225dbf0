#pragma once

// Starts the ranks of this node, passes their output on, and ends all of them when one fails.

#include <deque>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "console.h"
#include "exit_report.h"
#include "rank_environment.h"
#include "rendezvous.h"
#include "run_options.h"
#include "worker.h"

namespace fsdp2::tool {

class Supervisor {
 public:
  Supervisor(const RunOptions& options, const JobShape& job, Rendezvous& rendezvous, pid_t watchdog);
  ~Supervisor();
  /// Runs the job to its end and returns the exit code of `fsdp2 run`.
  int run();

 private:
  using Clock = std::chrono::steady_clock;
  struct Rank {
    Worker worker;
    std::unique_ptr<RankStream> out, err;
  };

  OutputQueue& out_console();
  void start_ranks();
  void wait_for_event();
  void handle_signals();
  void reap();
  void check_other_nodes();
  void stop(int signal_number);
  void signal_everything(int signal_number);
  void advance_shutdown();
  bool all_ended() const;
  std::set<pid_t> spared() const;
  void end_leftovers();
  int report();
  void note(const std::string& text);

  const RunOptions& options_;
  const JobShape& job_;
  Rendezvous& rendezvous_;
  pid_t watchdog_;
  OutputQueue stdout_{1}, stderr_{2};
  std::vector<Rank> ranks_;
  Clock::time_point started_ = Clock::now(), next_node_check_ = started_;
  std::optional<Clock::time_point> kill_at_, give_up_at_;
  bool gave_up_ = false;
  std::string stop_reason_;  // why ranks were told to stop, if not because of one of ours
};

}  // namespace fsdp2::tool
