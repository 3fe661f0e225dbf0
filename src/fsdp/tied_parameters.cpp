#include "fsdp/tied_parameters.h"

#include <algorithm>
#include <functional>
#include <string>

#include <fsdp2/error.h>

#include "fsdp/ignored_params.h"

namespace fsdp2::detail {

namespace {

using States = std::vector<std::shared_ptr<ModuleState>>;
/// One place in the module tree that has a parameter.
struct Use {
  Tensor param;
  std::string fqn;
  ParameterOwner owner;  // null where no group has it
  const States& around;  // from the outside in
};
using Visitor = std::function<void(const Use&)>;

void visit_uses(const torch::nn::Module& module, const std::string& prefix, States around, const Visitor& visitor) {
  if (auto state = state_of(module)) {
    around.push_back(std::move(state));
  }
  for (const auto& named : module.named_parameters(/*recurse=*/false)) {
    if (named.value().defined()) {
      visitor({named.value(), prefix + named.key(), owner_of(named.value()), around});
    }
  }
  for (const auto& child : module.named_children()) {
    visit_uses(*child.value(), prefix + child.key() + ".", around, visitor);
  }
}

bool contains(const States& states, const std::shared_ptr<ModuleState>& state) {
  return std::find(states.begin(), states.end(), state) != states.end();
}

}  // namespace

std::vector<MisplacedParameter> misplaced_parameters(const std::vector<std::shared_ptr<torch::nn::Module>>& roots) {
  const States below = states_under(roots);
  std::vector<MisplacedParameter> found;
  for (const auto& root : roots) {
    visit_uses(*root, "", {}, [&](const Use& use) {
      if (!use.owner || contains(use.around, use.owner.state) || !contains(below, use.owner.state)) {
        return;
      }
      const bool known =
          std::any_of(found.begin(), found.end(), [&](const auto& each) { return each.param.is_same(use.param); });
      if (!known) found.push_back({use.param, use.owner});
    });
  }
  return found;
}

void check_parameters_taken(const torch::nn::Module& root) {
  visit_uses(root, "", {}, [&](const Use& use) {
    FSDP2_CHECK(
        !use.owner || contains(use.around, use.owner.state), kUsage, "[fsdp] parameter ", use.fqn, " of ", root.name(),
        " is tied to parameter ", use.owner.fqn(), " of ", use.owner.state->label(),
        ", and no fully_shard call covers all its users, so it would not be whole here; call fully_shard also on "
        "a module that contains all of them, or once on the list of them, fully_shard({a, b})");
    const bool needs_owner = use.param.requires_grad() && !is_marked(use.param) && !is_ignored_param(use.param);
    FSDP2_CHECK(use.owner || !needs_owner, kUsage, "[fsdp] parameter ", use.fqn, " of ", root.name(),
                " was registered after fully_shard, so nothing would reduce its gradient; call fully_shard when the "
                "model is complete, or list it in ignored_params");
  });
}

}  // namespace fsdp2::detail
