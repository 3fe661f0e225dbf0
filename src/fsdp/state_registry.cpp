#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

#include "fsdp/leaf_slot.h"
#include "fsdp/module_state.h"
#include "fsdp/reshard_all.h"

namespace fsdp2::detail {

namespace {

struct Entry {
  std::weak_ptr<torch::nn::Module> module;
  std::shared_ptr<ModuleState> state;
};

struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<const torch::nn::Module*, Entry> entries;
  std::atomic<size_t> size{0};
};

// Leaked: modules may outlive static destructors.
Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

/// The state of a live module. An entry whose module is gone may meet a new module at the same address.
const Entry* live_entry(const Registry& all, const torch::nn::Module& module) {
  const auto found = all.entries.find(&module);
  return found == all.entries.end() || found->second.module.expired() ? nullptr : &found->second;
}

/// In module order, each once: those of a list are one. Called in every step, so most modules, which have neither a
/// state nor children, are not remembered.
struct StateWalk {
  Registry& all = registry();
  const std::shared_lock<std::shared_mutex> lock{all.mutex};
  std::unordered_set<const torch::nn::Module*> seen;
  std::unordered_set<const ModuleState*> found;
  std::vector<std::shared_ptr<ModuleState>> states;

  void visit(const torch::nn::Module& module) {
    const auto children = module.children();
    const Entry* entry = live_entry(all, module);
    if ((children.empty() && entry == nullptr) || !seen.insert(&module).second) {
      return;
    }
    if (entry != nullptr && found.insert(entry->state.get()).second) {
      states.push_back(entry->state);
    }
    for (const auto& child : children) {
      visit(*child);
    }
  }
};

}  // namespace

ModuleState* find_state(const torch::nn::Module& module) {
  Registry& all = registry();
  if (all.size.load(std::memory_order_acquire) == 0) {
    return nullptr;
  }
  const std::shared_lock lock(all.mutex);
  const Entry* entry = live_entry(all, module);
  return entry == nullptr ? nullptr : entry->state.get();
}

std::shared_ptr<ModuleState> state_of(const torch::nn::Module& module) {
  Registry& all = registry();
  const std::shared_lock lock(all.mutex);
  const Entry* entry = live_entry(all, module);
  return entry == nullptr ? nullptr : entry->state;
}

void register_state(const std::shared_ptr<torch::nn::Module>& module, std::shared_ptr<ModuleState> state) {
  purge_states();
  Registry& all = registry();
  const std::unique_lock lock(all.mutex);
  all.entries[module.get()] = {module, std::move(state)};
  all.size.store(all.entries.size(), std::memory_order_release);
}

void purge_states() noexcept {
  std::vector<std::shared_ptr<ModuleState>> dead;  // destroyed outside the lock
  Registry& all = registry();
  const std::unique_lock lock(all.mutex);
  for (auto entry = all.entries.begin(); entry != all.entries.end();) {
    if (entry->second.module.expired()) {
      dead.push_back(std::move(entry->second.state));
      entry = all.entries.erase(entry);
    } else {
      ++entry;
    }
  }
  all.size.store(all.entries.size(), std::memory_order_release);
}

std::vector<std::shared_ptr<ModuleState>> states_under(const torch::nn::Module& module) {
  StateWalk walk;
  walk.visit(module);
  return std::move(walk.states);
}

std::vector<std::shared_ptr<ModuleState>> states_under(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  StateWalk walk;
  for (const auto& module : modules) walk.visit(*module);
  return std::move(walk.states);
}

void reshard_all(const torch::nn::Module& module) {
  for (const auto& state : states_under(module)) {
    for (const auto& group : state->groups) {
      group->reshard();
    }
  }
}

ParameterOwner owner_of(const Tensor& param) {
  const auto target = leaf_target_of(param);
  ParameterOwner owner;
  owner.group = target ? target->group.lock() : nullptr;
  if (!owner.group) {
    return {};
  }
  owner.index = target->index;
  owner.state = owner.group->owner.lock();
  const auto& params = owner.group->params();
  const bool there = owner.index < params.size() && params[owner.index].param().is_same(param);
  return there && owner.state && !owner.state->modules().empty() ? owner : ParameterOwner{};
}

const std::string& ParameterOwner::fqn() const { return group->params()[index].fqn(); }

}  // namespace fsdp2::detail
