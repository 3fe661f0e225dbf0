#pragma once

// The environment of each rank: ours plus what torchrun sets.

#include <string>
#include <utility>
#include <vector>

#include "run_options.h"

namespace fsdp2::tool {

/// What the launchers agreed on.
struct JobShape {
  std::string run_id;     // TORCHELASTIC_RUN_ID
  std::string unique_id;  // of this launcher
  int world_size = 1, first_rank = 0, port = 0;
  std::string scratch_folder;  // error files; one sub-folder per local rank
};

using Variables = std::vector<std::pair<std::string, std::string>>;

/// The variables that `fsdp2 run` sets for a local rank.
Variables rank_variables(const RunOptions& options, const JobShape& job, int local_rank);
/// This process's environment with `variables` over it, as "NAME=value".
std::vector<std::string> merged_environment(const Variables& variables);
/// Folder of one local rank's files, as torchrun names it.
std::string rank_folder(const JobShape& job, int local_rank);
/// The text before each line of a rank: "[rank 1] ", or TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE
/// filled in.
std::string line_prefix(const RunOptions& options, const JobShape& job, int local_rank);

}  // namespace fsdp2::tool
