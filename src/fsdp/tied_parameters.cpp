#include "fsdp/tied_parameters.h"

#include <algorithm>
#include <functional>
#include <string>
#include <unordered_map>

#include <fsdp2/error.h>

#include "fsdp/ignored_params.h"
#include "fsdp/module_state.h"

namespace fsdp2::detail {

namespace {

using States = std::vector<std::shared_ptr<ModuleState>>;
/// One place in the module tree that has a parameter of some group.
struct Use {
  Tensor param;
  std::string fqn;
  std::shared_ptr<ModuleState> owner;
  std::string owners_name;  // for the parameter
  const States& around;     // from the outside in
};
using Visitor = std::function<void(const Use&)>;

class ParameterWalk {
 public:
  explicit ParameterWalk(Visitor visitor) : visitor_(std::move(visitor)), owners_(parameter_owners()) {}

  void visit(const torch::nn::Module& module, const std::string& prefix, States around) {
    if (auto state = state_of(module)) {
      around.push_back(std::move(state));
    }
    for (const auto& named : module.named_parameters(/*recurse=*/false)) {
      if (!named.value().defined()) {
        continue;
      }
      const auto owner = owners_.find(named.value().unsafeGetTensorImpl());
      if (owner != owners_.end()) {
        visitor_({named.value(), prefix + named.key(), owner->second.first, owner->second.second, around});
      }
    }
    for (const auto& child : module.named_children()) {
      visit(*child.value(), prefix + child.key() + ".", around);
    }
  }

 private:
  Visitor visitor_;
  std::unordered_map<const c10::TensorImpl*, std::pair<std::shared_ptr<ModuleState>, std::string>> owners_;
};

bool contains(const States& states, const std::shared_ptr<ModuleState>& state) {
  return std::find(states.begin(), states.end(), state) != states.end();
}

}  // namespace

std::vector<MisplacedParameter> misplaced_parameters(const std::vector<std::shared_ptr<torch::nn::Module>>& roots) {
  States below;
  for (const auto& root : roots) {
    for (auto& state : states_under(*root)) below.push_back(std::move(state));
  }
  std::vector<MisplacedParameter> found;
  ParameterWalk walk([&](const Use& use) {
    const bool known =
        std::any_of(found.begin(), found.end(), [&](const auto& each) { return each.param.is_same(use.param); });
    if (!known && contains(below, use.owner) && !contains(use.around, use.owner)) {
      found.push_back({use.param, use.owner});
    }
  });
  for (const auto& root : roots) walk.visit(*root, "", {});
  return found;
}

void check_tied_parameters(const torch::nn::Module& root) {
  ParameterWalk walk([&](const Use& use) {
    FSDP2_CHECK(
        contains(use.around, use.owner), kUsage, "[fsdp] parameter ", use.fqn, " of ", root.name(),
        " is tied to parameter ", use.owners_name, " of ", use.owner->label(),
        ", and no fully_shard call covers all "
        "its users, so it would not be whole here; call fully_shard also on a module that contains all of them, or "
        "once on the list of them, fully_shard({a, b})");
  });
  walk.visit(root, "", {});
}

void check_all_parameters_taken(const torch::nn::Module& root) {
  const auto owners = parameter_owners();
  for (const auto& named : root.named_parameters()) {
    const Tensor& param = named.value();
    if (!param.defined() || !param.requires_grad() || is_marked(param) || is_ignored_param(param)) {
      continue;
    }
    FSDP2_CHECK(owners.count(param.unsafeGetTensorImpl()) != 0, kUsage, "[fsdp] parameter ", named.key(), " of ",
                root.name(),
                " was registered after fully_shard, so nothing would reduce its gradient; call fully_shard "
                "when the model is complete, or list it in ignored_params");
  }
}

}  // namespace fsdp2::detail
