#pragma once

#include "run_options.h"

namespace fsdp2::tool {

/// `fsdp2 run`: returns its exit code. `program_args` is main's argv.
int run(const RunOptions& options, char** program_args);

}  // namespace fsdp2::tool
