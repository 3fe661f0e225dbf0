#pragma once

// Which rank writes what.

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dcp/exchange.h"
#include "dcp/save_items.h"

namespace fsdp2::dcp::detail {

/// What all ranks together write for one key.
struct PlannedItem {
  std::string fqn;
  Path path;
  std::optional<TensorEntry> tensor;      // chunks of all ranks
  int first_rank = 0;                     // that has it
  std::vector<std::vector<int>> holders;  // ranks that have chunk i (the value)
  std::vector<int> owners;                // the one that writes it
};

struct SavePlan {
  std::vector<PlannedItem> items;
  std::array<uint64_t, 2> id{};  // of the layouts of all ranks: equal plans have equal ones
};

/// Names, shapes and chunks of what a rank has; no values.
std::string encode_layout(const std::vector<SaveItem>& items, Replicas replicas);

/// Joins the layouts of all ranks; every rank does it and comes to the same result. kInvalidArgument where ranks
/// contradict each other, or together do not have the whole of a tensor.
SavePlan make_plan(const std::vector<std::string>& layouts, Replicas replicas);
/// Of a rank that describes its own items alone.
SavePlan make_own_plan(const std::string& layout, int rank);

/// The plan of the last save of a group, where this rank's layout is still the same; else null. It may be used where
/// every rank has one with the same id.
std::shared_ptr<const SavePlan> find_plan(const Exchange& exchange, const std::string& layout);
void keep_plan(const Exchange& exchange, const std::string& layout, std::shared_ptr<const SavePlan> plan);

}  // namespace fsdp2::dcp::detail
