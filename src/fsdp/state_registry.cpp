#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

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

void collect_states(const torch::nn::Module& module, std::unordered_set<const torch::nn::Module*>& seen,
                    std::vector<std::shared_ptr<ModuleState>>& states) {
  if (!seen.insert(&module).second) {
    return;
  }
  if (auto state = state_of(module); state && std::find(states.begin(), states.end(), state) == states.end()) {
    states.push_back(std::move(state));
  }
  for (const auto& child : module.children()) {
    collect_states(*child, seen, states);
  }
}

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
  std::unordered_set<const torch::nn::Module*> seen;
  std::vector<std::shared_ptr<ModuleState>> states;
  collect_states(module, seen, states);
  return states;
}

void reshard_all(const torch::nn::Module& module) {
  for (const auto& state : states_under(module)) {
    for (const auto& group : state->groups) {
      group->reshard();
    }
  }
}

std::vector<std::shared_ptr<ModuleState>> all_states() {
  Registry& all = registry();
  const std::shared_lock lock(all.mutex);
  std::vector<std::shared_ptr<ModuleState>> states;
  for (const auto& [module, entry] : all.entries) {
    if (!entry.module.expired() && std::find(states.begin(), states.end(), entry.state) == states.end()) {
      states.push_back(entry.state);
    }
  }
  return states;
}

std::unordered_map<const c10::TensorImpl*, std::pair<std::shared_ptr<ModuleState>, std::string>> parameter_owners() {
  std::unordered_map<const c10::TensorImpl*, std::pair<std::shared_ptr<ModuleState>, std::string>> owners;
  for (const auto& state : all_states()) {
    for (const auto& group : state->groups) {
      for (const FSDPParam& param : group->params()) {
        owners.emplace(param.param().unsafeGetTensorImpl(), std::make_pair(state, param.fqn()));
      }
    }
  }
  return owners;
}

}  // namespace fsdp2::detail
