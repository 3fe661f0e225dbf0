#include "dcp/absences.h"

#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include <algorithm>

namespace fsdp2::dcp::detail {

std::string some_of(const std::vector<std::string>& names) {
  const size_t shown = std::min<size_t>(names.size(), 10);
  std::string text = c10::Join(", ", std::vector<std::string>(names.begin(), names.begin() + shown));
  if (shown < names.size()) text += c10::str(" and ", names.size() - shown, " more");
  return text;
}

Absences::Dict& Absences::dict_of(const Leaf& leaf) {
  if (dicts_.empty() || dicts_.back().dict != leaf.dict) dicts_.push_back({leaf.dict, {}, {}});
  return dicts_.back();
}

void Absences::add_found(const Leaf& leaf) {
  if (leaf.absent != Absent::kAllOrNone) return;
  std::string& first = dict_of(leaf).found;
  if (first.empty()) first = leaf.fqn;
}

void Absences::add_missing(const Leaf& leaf) {
  if (leaf.absent == Absent::kError) errors_.push_back(leaf.fqn);
  if (leaf.absent == Absent::kDropEach) dropped_.push_back(leaf);
  if (leaf.absent != Absent::kAllOrNone) return;
  std::string& first = dict_of(leaf).missing;
  if (first.empty()) first = leaf.fqn;
}

void Absences::check(const std::string& folder, const std::function<bool(const std::string&)>& saved_by_rank) const {
  for (const Dict& keys : dicts_) {
    FSDP2_CHECK(keys.found.empty() || keys.missing.empty(), kNotFound, "[dcp] the checkpoint ", folder, " has ",
                keys.found, " but not ", keys.missing,
                ": a part of the state of one parameter cannot be loaded; save it anew, use an optimizer with the same "
                "options, or name the key in allow_missing to keep its value");
  }
  const bool by_rank = std::any_of(errors_.begin(), errors_.end(), saved_by_rank);
  FSDP2_CHECK(errors_.empty(), kNotFound, "[dcp] the checkpoint ", folder,
              " lacks keys that the target has: ", some_of(errors_),
              by_rank ? "; it has one for each rank: mark the target with dcp::per_rank() too"
                      : "; set allow_partial = true, or name them in allow_missing, to keep their present values");
}

void Absences::settle() {
  size_t emptied = 0;
  std::string example;
  for (const Dict& keys : dicts_) {
    if (keys.missing.empty()) continue;
    if (emptied++ == 0) example = keys.missing;
    *keys.dict = StateDict();
  }
  if (emptied > 0)
    FSDP2_LOG_WARN("[dcp] the checkpoint has no state of ", emptied, " parameters, e.g. no ", example,
                   "; they start afresh");
  std::vector<std::string> names;
  for (const Leaf& leaf : dropped_) {
    names.push_back(leaf.fqn);
    leaf.dict->erase(std::get<std::string>(leaf.path.back()));
  }
  if (!names.empty())
    FSDP2_LOG_WARN("[dcp] the checkpoint lacks the hyper-parameters ", some_of(names), "; they keep their values");
}

}  // namespace fsdp2::dcp::detail
