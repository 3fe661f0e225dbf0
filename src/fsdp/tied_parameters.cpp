#include "fsdp/tied_parameters.h"

#include <algorithm>
#include <functional>
#include <string>
#include <unordered_map>

#include <fsdp2/error.h>

#include "fsdp/module_state.h"

namespace fsdp2::detail {

namespace {

using States = std::vector<std::shared_ptr<ModuleState>>;
/// Called with a parameter, one of its names, its owner and the states around this use.
using Visitor = std::function<void(const Tensor&, const std::string&, const std::shared_ptr<ModuleState>&, const States&)>;

class ParameterWalk {
 public:
  ParameterWalk(const torch::nn::Module& root, Visitor visitor) : visitor_(std::move(visitor)) {
    for (const auto& state : states_under(root)) {
      for (const auto& group : state->groups) {
        for (const FSDPParam& param : group->params()) {
          owners_.emplace(param.param().unsafeGetTensorImpl(), state);
        }
      }
    }
  }

  void visit(const torch::nn::Module& module, const std::string& prefix, States around) {
    if (auto state = state_of(module)) {
      around.push_back(std::move(state));
    }
    for (const auto& named : module.named_parameters(/*recurse=*/false)) {
      if (!named.value().defined()) {
        continue;
      }
      auto owner = owners_.find(named.value().unsafeGetTensorImpl());
      if (owner == owners_.end() && is_marked(named.value())) {
        owner = owners_.emplace(named.value().unsafeGetTensorImpl(), owner_of(named.value())).first;
      }
      if (owner != owners_.end() && owner->second) {
        visitor_(named.value(), prefix + named.key(), owner->second, around);
      }
    }
    for (const auto& child : module.named_children()) {
      visit(*child.value(), prefix + child.key() + ".", around);
    }
  }

 private:
  Visitor visitor_;
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<ModuleState>> owners_;
};

bool contains(const States& states, const std::shared_ptr<ModuleState>& state) {
  return std::find(states.begin(), states.end(), state) != states.end();
}

}  // namespace

std::vector<MisplacedParameter> misplaced_parameters(const torch::nn::Module& root) {
  const States below = states_under(root);
  std::vector<MisplacedParameter> found;
  ParameterWalk walk(root, [&](const Tensor& param, const std::string&, const std::shared_ptr<ModuleState>& owner,
                               const States& around) {
    const bool known = std::any_of(found.begin(), found.end(), [&](const auto& each) { return each.param.is_same(param); });
    if (!known && contains(below, owner) && !contains(around, owner)) {
      found.push_back({param, owner});
    }
  });
  walk.visit(root, "", {});
  return found;
}

void check_tied_parameters(const torch::nn::Module& root) {
  ParameterWalk walk(root, [](const Tensor&, const std::string& fqn, const std::shared_ptr<ModuleState>& owner,
                              const States& around) {
    FSDP2_CHECK(contains(around, owner), kUsage, "[fsdp] parameter ", fqn, " is tied to a parameter that ",
                owner->label(), " shards, and no fully_shard call covers all its users, so it would not be whole here; call "
                "fully_shard also on a module that contains all of them, or once on the list of them, fully_shard({a, b})");
  });
  walk.visit(root, "", {});
}

}  // namespace fsdp2::detail
