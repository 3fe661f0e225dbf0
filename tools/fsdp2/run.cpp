#include "run.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <iostream>

#include <fsdp2/error.h>

#include "process_sweep.h"
#include "rank_environment.h"
#include "rendezvous.h"
#include "supervisor.h"

namespace fsdp2::tool {
namespace {

std::string make_scratch_folder(const RunOptions& options, const std::string& name) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::path parent = options.log_dir.empty() ? fs::temp_directory_path(error) : fs::absolute(options.log_dir, error);
  if (!error) fs::create_directories(parent, error);
  std::string folder = (parent / (name + "_XXXXXX")).string();
  FSDP2_CHECK(!error && mkdtemp(folder.data()), kIo, "[run] cannot make a folder in ", parent.string(), ": ",
              error ? error.message() : strerror(errno), "; give another one with ",
              options.log_dir.empty() ? "TMPDIR" : "--log-dir");
  return folder;
}

void print_plan(const RunOptions& options, JobShape job) {
  job.run_id = options.run_id.empty() ? "(a fresh unique id)" : options.run_id;
  job.unique_id = "(a fresh unique id)";
  job.scratch_folder = "(a fresh folder)";
  job.port = options.master_port;
  // With several nodes, the others are taken to have as many ranks as this one.
  job.world_size = options.num_nodes * options.num_local_ranks;
  job.first_rank = options.node_rank * options.num_local_ranks;
  for (int local_rank = 0; local_rank < options.num_local_ranks; ++local_rank) {
    std::cout << "# rank " << job.first_rank + local_rank << ":";
    for (const auto& word : options.command) std::cout << ' ' << word;
    std::cout << '\n';
    for (const auto& [name, value] : rank_variables(options, job, local_rank)) {
      std::cout << name << '=' << (name == "MASTER_PORT" && job.port == 0 ? "(a free port)" : value) << '\n';
    }
  }
}

}  // namespace

int run(const RunOptions& options, char** program_args) {
  JobShape job;
  if (options.dry_run) {
    print_plan(options, job);
    return 0;
  }
  job.unique_id = make_unique_id();
  job.scratch_folder = make_scratch_folder(options, options.run_id.empty() ? job.unique_id : "fsdp2-run");
  bool keep_folder = !options.log_dir.empty();
  int code = 1;
  {
    Watchdog watchdog(job.unique_id, keep_folder ? "" : job.scratch_folder, program_args);
    RunOptions resolved = options;
    // With one node the run's id is known before the ranks, and is the one that the watchdog looks
    // for.
    if (resolved.run_id.empty() && resolved.num_nodes == 1) resolved.run_id = job.unique_id;
    Rendezvous rendezvous(resolved);
    job.run_id = rendezvous.run_id();
    job.port = rendezvous.port();
    job.world_size = rendezvous.world_size();
    job.first_rank = rendezvous.first_rank();
    Supervisor supervisor(resolved, job, rendezvous, watchdog.pid());
    code = supervisor.run();
  }
  std::error_code ignored;
  if (!keep_folder) std::filesystem::remove_all(job.scratch_folder, ignored);
  return code;
}

}  // namespace fsdp2::tool
