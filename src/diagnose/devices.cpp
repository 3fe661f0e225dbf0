// Whether every rank has a device of its own.

#include <fsdp2/process_group.h>

#include <map>
#include <utility>

#include "diagnose/between_ranks.h"

namespace fsdp2::detail::diagnose {

namespace {

/// Ranks of one host that have the same number; the first such set, empty where there is none.
template <class Of>
std::vector<int> sharing(const std::vector<RankRow>& rows, Of&& number_of) {
  std::map<std::pair<int64_t, int64_t>, std::vector<int>> users;
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    if (const auto number = number_of(rows[rank])) {
      users[{rows[rank].host, *number}].push_back(static_cast<int>(rank));
    }
  }
  std::vector<int> first;
  for (const auto& [key, ranks] : users) {
    if (ranks.size() > 1 && (first.empty() || ranks < first)) first = ranks;
  }
  return first;
}

}  // namespace

void check_devices(const std::vector<RankRow>& rows, Findings& found) {
  const char* fix =
      "start the program with `fsdp2 run` (torchrun, mpirun and srun work too), which sets LOCAL_RANK, and use "
      "fsdp2::local_device() for models and data";
  const auto device = [](const RankRow& row) { return row.device != 0 ? std::optional(row.device) : std::nullopt; };
  if (const auto ranks = sharing(rows, device); !ranks.empty()) {
    found.push_back({"shared-device", Severity::kError,
                     c10::str("ranks ", c10::Join(", ", ranks), " of one host compute on one device, number ",
                              rows[ranks.front()].device_index),
                     "", fix, ranks});
  }
  const auto local = [](const RankRow& row) { return std::optional(row.local_rank); };
  if (const auto ranks = sharing(rows, local); !ranks.empty()) {
    const bool on_cpu = rows[ranks.front()].device == 0;
    found.push_back(
        {"local-rank", on_cpu ? Severity::kNote : Severity::kError,
         c10::str("ranks ", c10::Join(", ", ranks), " of one host all have local rank ", rows[ranks.front()].local_rank,
                  on_cpu ? ": no harm on the CPU, on GPUs they would use one device" : ""),
         "", fix, ranks});
    return;
  }
  std::vector<int> elsewhere;
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    const RankRow& row = rows[rank];
    // One device may be all that a process sees of several, as number 0.
    if (row.device != 0 && row.visible_devices > 1 && row.device_index != row.local_rank) {
      elsewhere.push_back(static_cast<int>(rank));
    }
  }
  if (!elsewhere.empty()) {
    const RankRow& row = rows[elsewhere.front()];
    found.push_back({"local-rank", Severity::kError,
                     c10::str("rank ", elsewhere.front(), " has local rank ", row.local_rank, ", and its model is on ",
                              "device ", row.device_index),
                     "", fix, elsewhere});
  }
}

}  // namespace fsdp2::detail::diagnose
