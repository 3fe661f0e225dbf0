// How the model was cut into groups.

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "diagnose/refusals.h"
#include "diagnose/subject.h"
#include "fsdp/ignored_params.h"

namespace fsdp2::detail::diagnose {

namespace {

void check_all_sharded(const Subject& subject, Findings& found) {
  std::vector<std::string> plain;
  for (const SeenParam& param : subject.params) {
    if (param.spec() == nullptr && param.trainable() && !is_ignored_param(param.tensor)) plain.push_back(param.fqn);
  }
  if (subject.states.empty() && !plain.empty()) {
    found.push_back({"nothing-sharded", Severity::kWarning,
                     c10::str("no module was given to fully_shard: every rank has all of it and trains for itself"), "",
                     "call fully_shard on each block, then on the model"});
  } else if (!plain.empty()) {
    found.push_back({"parameter-not-sharded", Severity::kWarning,
                     c10::str("trainable and in no group, so nothing reduces their gradients: ", list_names(plain)),
                     plain.front(),
                     "call fully_shard also on the model itself, last; or list them in ignored_params and reduce their "
                     "gradients yourself"});
  }
}

void check_order(const Subject& subject, Findings& found) {
  for (const auto& named : subject.model.named_modules()) {
    if (!was_refused_shard(*named.value())) continue;
    found.push_back({"root-sharded-first", Severity::kError,
                     "fully_shard was refused for it, because a module that contains it was sharded before and has its "
                     "parameters",
                     named.key(), "call fully_shard on the blocks first and on the model last"});
    return;
  }
}

/// Modules that could have a group of their own, with a tenth of the group each.
class Parts {
 public:
  Parts(const SeenState& whole, int64_t smallest) : smallest_(std::max(smallest, whole.whole_bytes() / 10)) {
    for (const auto& group : whole.state->groups) {
      for (const FSDPParam& param : group->params()) {
        bytes_.emplace(param.param().unsafeGetTensorImpl(), whole_bytes(param, whole.state->policy()));
      }
    }
    for (const auto& module : whole.state->modules()) visit(*module, whole.fqn);
  }
  std::vector<std::string> names;

 private:
  int64_t bytes_below(const torch::nn::Module& module) const {
    int64_t sum = 0;
    std::unordered_set<const c10::TensorImpl*> seen;
    for (const Tensor& param : module.parameters()) {
      const auto known = bytes_.find(param.unsafeGetTensorImpl());
      if (known != bytes_.end() && seen.insert(known->first).second) sum += known->second;
    }
    return sum;
  }

  void visit(const torch::nn::Module& module, const std::string& prefix) {
    int64_t all = 0;
    for (const auto& child : module.children()) all += bytes_below(*child);
    for (const auto& child : module.named_children()) {
      const torch::nn::Module& each = *child.value();
      const int64_t bytes = bytes_below(each);
      if (bytes < smallest_) continue;
      const std::string fqn = prefix.empty() ? child.key() : prefix + "." + child.key();
      const bool container = dynamic_cast<const torch::nn::ModuleListImpl*>(&each) != nullptr ||
                             dynamic_cast<const torch::nn::ModuleDictImpl*>(&each) != nullptr;
      const bool wraps = 10 * bytes > 9 * all && !each.children().empty();
      if (container || wraps) {
        visit(each, fqn);
      } else {
        names.push_back(fqn);
      }
    }
  }

  int64_t smallest_;
  std::unordered_map<const c10::TensorImpl*, int64_t> bytes_;
};

void check_balance(const Subject& subject, Findings& found) {
  int64_t total = 0, groups = 0;
  const SeenState* largest = nullptr;
  for (const SeenState& each : subject.states) {
    if (each.state->groups.empty()) continue;
    const int64_t bytes = each.whole_bytes();
    total += bytes;
    ++groups;
    if (largest == nullptr || bytes > largest->whole_bytes()) largest = &each;
  }
  if (largest == nullptr) return;
  const int64_t bytes = largest->whole_bytes();
  const Parts parts(*largest, subject.small_group_bytes);
  if (parts.names.size() < 2 || 10 * bytes < 6 * total) return;
  // In a small model one block is soon most of it, and what splitting it saves is not worth a group.
  constexpr int64_t kWorthSplitting = 16;
  if (groups > 1 && bytes < kWorthSplitting * subject.small_group_bytes) return;
  const std::string fix =
      c10::str("call fully_shard on ", list_names(parts.names), " before it (a layer of torch::nn as ",
               "Hooked<...>, so that calling it runs the hooks)");
  if (groups == 1) {
    found.push_back({"only-root-sharded", Severity::kWarning,
                     c10::str("the only group has all ", bytes_text(bytes),
                              ": everything is gathered at once, and no gather runs beside a computation"),
                     largest->fqn, fix});
  } else {
    found.push_back(
        {"dominant-group", Severity::kWarning,
         c10::str("its group has ", bytes_text(bytes), " of the model's ", bytes_text(total), ", ", 100 * bytes / total,
                  " %: the peak of memory is set by it, and the other groups' gathers ", "are short beside its own"),
         largest->fqn, fix});
  }
}

}  // namespace

void check_sharding(const Subject& subject, Findings& found) {
  check_all_sharded(subject, found);
  check_order(subject, found);
  check_balance(subject, found);
}

}  // namespace fsdp2::detail::diagnose
