// Settings that cost communication or memory without a gain.

#include <algorithm>

#include "diagnose/subject.h"

namespace fsdp2::detail::diagnose {

namespace {

int64_t shard_size(const SeenState& each) {
  int64_t size = 1;
  for (const auto& group : each.state->groups) size = std::max(size, group->mesh().shard_size);
  return size;
}

void check_small_groups(const Subject& subject, Findings& found) {
  std::vector<std::string> names;
  int64_t largest = 0;
  for (const SeenState& each : subject.states) {
    const int64_t bytes = each.whole_bytes();
    // What is left for the root is as it is; only what could be part of a group above is worth a word.
    if (!each.has_state_above || each.state->groups.empty() || shard_size(each) == 1) continue;
    if (bytes >= subject.small_group_bytes) continue;
    names.push_back(each.name());
    largest = std::max(largest, bytes);
  }
  if (names.empty()) return;
  found.push_back({"small-groups", Severity::kNote,
                   c10::str(names.size(), names.size() == 1 ? " group has" : " groups have", " at most ",
                            bytes_text(largest), " (small is below ", bytes_text(subject.small_group_bytes),
                            "): the time of their collectives is latency: ", list_names(names)),
                   names.front(),
                   "leave them to the group around them, or shard several as one: fully_shard({a, b, c})"});
}

/// Groups that never change and are small beside the rest: keeping them whole costs little and saves their gathers.
void check_frozen(const Subject& subject, Findings& found) {
  std::vector<std::string> names;
  int64_t frozen = 0, total = 0;
  for (const SeenState& each : subject.states) {
    total += each.whole_bytes();
    for (const auto& group : each.state->groups) {
      const auto& params = group->params();
      const bool trainable =
          std::any_of(params.begin(), params.end(), [](const FSDPParam& param) { return param.requires_grad(); });
      const bool kept = !each.state->reshards_after_forward() && !group->settings.reshard_after_backward;
      if (trainable || kept || group->mesh().shard_size == 1) continue;
      names.push_back(each.name());
      for (const FSDPParam& param : params) frozen += whole_bytes(param, each.state->policy());
    }
  }
  if (names.empty() || 10 * frozen > total) return;
  found.push_back({"frozen-gathered", Severity::kNote,
                   c10::str("frozen, and gathered in every step though the values never change: ", list_names(names),
                            "; kept whole they take ", bytes_text(frozen), " beside the model's ", bytes_text(total)),
                   names.front(),
                   "pass their parameters in ignored_params (whole on every rank, never gathered), or keep them: "
                   "set_reshard_after_forward(false) and set_reshard_after_backward(false)"});
}

void check_reshard(const Subject& subject, Findings& found) {
  std::vector<std::string> one_part, all_parts;
  for (const SeenState& each : subject.states) {
    const ReshardAfterForward& asked = each.state->asked_reshard;
    if (!asked || each.state->groups.empty()) continue;
    const DataParallelMesh& mesh = each.state->groups.front()->mesh();
    const int* parts = std::get_if<int>(&*asked);
    if (shard_size(each) == 1) {
      if (mesh.size() == 1) continue;  // a job of one rank: nothing to say
      found.push_back({"reshard-cannot-pay", Severity::kNote,
                       c10::str("reshard_after_forward is set, but its ", mesh.size(),
                                " ranks are all replicas: nothing is sharded, nothing is freed"),
                       each.fqn, "leave it out, or shard over more than one rank: mesh (replicas, shards)"});
      return;
    }
    if (parts != nullptr && *parts == 1) one_part.push_back(each.name());
    if (parts != nullptr && *parts == shard_size(each)) all_parts.push_back(each.name());
    if (const bool* flag = std::get_if<bool>(&*asked);
        flag != nullptr && *flag && each.state->is_root() && subject.states.size() > 1) {
      found.push_back({"reshard-cannot-pay", Severity::kNote,
                       c10::str("reshard_after_forward = true on the root: its ", bytes_text(each.whole_bytes()),
                                " are freed after forward and gathered again at once, at the start of backward"),
                       each.fqn, "leave it out for the root: the default keeps its parameters until backward"});
    }
  }
  if (!one_part.empty()) {
    found.push_back({"reshard-cannot-pay", Severity::kNote,
                     c10::str("reshard_after_forward = 1 keeps whole parameters: ", list_names(one_part)),
                     one_part.front(), "say false, which is the same; or a number between 1 and the shard size"});
  }
  if (!all_parts.empty()) {
    found.push_back({"reshard-cannot-pay", Severity::kNote,
                     c10::str("reshard_after_forward is the shard size, so that all is freed: ", list_names(all_parts)),
                     all_parts.front(), "say true, which is the same; or a number between 1 and the shard size"});
  }
}

}  // namespace

void check_communication(const Subject& subject, Findings& found) {
  check_small_groups(subject, found);
  check_frozen(subject, found);
  check_reshard(subject, found);
}

}  // namespace fsdp2::detail::diagnose
