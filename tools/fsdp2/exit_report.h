#pragma once

// What is printed when a run fails.

#include <optional>
#include <string>
#include <vector>

#include "worker.h"

namespace fsdp2::tool {

struct RankReport {
  Worker worker;
  std::string last_line;  // of its stderr
};

/// The rank whose failure came first. Ranks that ended after they were told to stop count only when
/// no other failed; among those that ended at the same moment, the error files' times decide, then
/// signals come first.
std::optional<size_t> root_cause(const std::vector<RankReport>& ranks);

/// A table of the ranks, the root cause as its last row, then one sentence about it. One line per
/// element.
std::vector<std::string> exit_report(const std::vector<RankReport>& ranks, size_t root, double seconds);

}  // namespace fsdp2::tool
