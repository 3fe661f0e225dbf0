#include "dcp/optimizer_forms.h"

#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include <algorithm>
#include <optional>

namespace fsdp2::dcp::detail {
namespace {

constexpr std::string_view kStatePrefix = "state.", kGroupPrefix = "param_groups.";

/// Parameters in the order of the optimizers, with all their names; those that the view leaves out are not among them.
template <class Visit>
void each_group(const std::vector<torch::optim::Optimizer*>& optimizers, const ModelView& view, Visit visit) {
  for (const torch::optim::Optimizer* optimizer : optimizers) {
    for (const auto& group : optimizer->param_groups()) {
      std::vector<const std::vector<std::string>*> members;
      for (const at::Tensor& param : group.params()) {
        const auto* names = view.names(param, "a parameter of the optimizer");
        if (names != nullptr) members.push_back(names);
      }
      visit(members);
    }
  }
}

/// Plain values of hyper-parameters.
bool equal(const Value& a, const Value& b) {
  const auto number = [](const Value& v) -> std::optional<double> {
    if (v.kind() == Kind::Bool || v.kind() == Kind::Int || v.kind() == Kind::Double) return v.number();
    if (v.kind() == Kind::Tensor && v.tensor().numel() == 1) return v.tensor().item<double>();
    return std::nullopt;
  };
  if (number(a) && number(b)) return *number(a) == *number(b);
  if (a.kind() != b.kind()) return false;
  if (a.kind() == Kind::String) return a.str() == b.str();
  if (a.kind() != Kind::List && a.kind() != Kind::Tuple) return true;  // None
  return std::equal(a.list().begin(), a.list().end(), b.list().begin(), b.list().end(), equal);
}

class FlatReader {
 public:
  FlatReader(const StateDict& state, const ModelView& view) {
    for (const auto& [key, value] : state) {
      const std::string_view text = key;
      if (text.starts_with(kStatePrefix)) {
        add(state_, text.substr(kStatePrefix.size()), key, value, view);
      } else if (text.starts_with(kGroupPrefix)) {
        add(hyper_, text.substr(kGroupPrefix.size()), key, value, view);
      } else {
        FSDP2_THROW(kInvalidArgument, "[dcp] the flat optimizer state dict has the key '", key,
                    "'; its keys start with \"state.\" or \"param_groups.\"");
      }
    }
    if (foreign_ > 0)
      FSDP2_LOG_INFO("[dcp] ", foreign_, " keys of the optimizer state dict are of no parameter of the module, e.g. ",
                     first_foreign_);
  }

  StateDict nested(const std::vector<torch::optim::Optimizer*>& optimizers, const ModelView& view, bool strict) {
    std::vector<Value> groups;
    each_group(optimizers, view, [&](const auto& members) {
      StateDict group;
      std::vector<Value> params;
      std::string first;
      for (const auto* names : members) {
        const auto name = std::find_if(names->begin(), names->end(), [&](const auto& n) { return hyper_.contains(n); });
        if (name == names->end()) continue;
        const StateDict& hyper = std::as_const(hyper_).at(*name).dict();
        if (params.empty()) {
          group = hyper;
          first = *name;
        } else {
          compare(first, group, *name, hyper, strict);
        }
        params.emplace_back(*name);
      }
      if (params.empty()) return;
      group["params"] = std::move(params);
      groups.emplace_back(std::move(group));
    });
    return {{"state", std::move(state_)}, {"param_groups", std::move(groups)}};
  }

 private:
  /// `rest` is <fqn>.<field>, and either may have dots.
  void add(StateDict& to, std::string_view rest, const std::string& key, const Value& value, const ModelView& view) {
    for (size_t dot = rest.rfind('.'); dot != std::string_view::npos && dot > 0; dot = rest.rfind('.', dot - 1)) {
      const std::string fqn(rest.substr(0, dot));
      if (!view.has_parameter(fqn)) continue;
      Value& entry = to[fqn];
      if (entry.is_none()) entry = StateDict();
      entry.dict()[std::string(rest.substr(dot + 1))] = value;
      return;
    }
    if (foreign_++ == 0) first_foreign_ = key;
  }

  static void compare(const std::string& first, const StateDict& a, const std::string& second, const StateDict& b,
                      bool strict) {
    for (const auto& [key, value] : b) {
      if (!a.contains(key) || equal(a.at(key), value)) continue;
      const std::string text = c10::str(
          first, " and ", second, " are in one group of the optimizer and have different ", key, " in the state dict");
      FSDP2_CHECK(!strict, kInvalidArgument, "[dcp] ", text,
                  "; group the parameters as they were saved, or set strict = false to take the first one's");
      FSDP2_LOG_WARN("[dcp] ", text, "; the first one's is taken");
    }
  }

  StateDict state_, hyper_;
  size_t foreign_ = 0;
  std::string first_foreign_;
};

/// What torch.optim's own state_dict() gives; through a checkpoint, the numbers that are keys become text.
bool is_by_number(const std::vector<Value>& groups) {
  bool any = false;
  for (const Value& group : groups) {
    for (const Value& param : group.dict().at("params").list()) {
      if (param.kind() != Kind::Int) return false;
      any = true;
    }
  }
  return any;
}

StateDict from_numbers(const StateDict& state, const std::vector<torch::optim::Optimizer*>& optimizers,
                       const ModelView& view) {
  FSDP2_CHECK(optimizers.size() == 1, kInvalidArgument,
              "[dcp] the optimizer state dict has its parameters by number, as torch.optim saves one optimizer; here "
              "are ",
              optimizers.size(), " optimizers; set each from its own dict");
  std::vector<std::string> names;
  each_group(optimizers, view, [&](const auto& members) {
    for (const auto* all : members) names.push_back(all->front());
  });
  std::unordered_map<std::string, std::string> name_of;  // number as text
  std::vector<Value> groups = state.at("param_groups").list();
  size_t count = 0;
  for (const Value& group : groups) count += group.dict().at("params").list().size();
  FSDP2_CHECK(count == names.size(), kInvalidArgument, "[dcp] the optimizer state dict has ", count,
              " parameters, by number, and the optimizer ", names.size(),
              "; numbers say nothing then: save the dict by name (get_optimizer_state_dict)");
  size_t next = 0;
  for (Value& group : groups) {
    std::vector<Value> params;
    for (const Value& number : std::as_const(group).dict().at("params").list()) {
      name_of[std::to_string(number.integer())] = names[next];
      params.emplace_back(names[next++]);
    }
    group.dict()["params"] = std::move(params);
  }
  StateDict states;
  if (state.contains("state")) {
    for (const auto& [key, entry] : state.at("state").items()) {
      const std::string number = key.kind() == Kind::Int ? std::to_string(key.integer()) : key.str();
      const auto name = name_of.find(number);
      FSDP2_CHECK(name != name_of.end(), kInvalidArgument, "[dcp] the optimizer state dict has state for parameter ",
                  number, ", which is in none of its groups");
      states[name->second] = entry;
    }
  }
  return {{"state", std::move(states)}, {"param_groups", std::move(groups)}};
}

}  // namespace

StateDict flat_form(const StateDict& nested) {
  StateDict flat;
  for (const auto& [fqn, entry] : nested.at("state").dict()) {
    for (const auto& [field, value] : entry.dict()) flat[std::string(kStatePrefix) + fqn + "." + field] = value;
  }
  for (const Value& group : nested.at("param_groups").list()) {
    for (const Value& fqn : group.dict().at("params").list()) {
      for (const auto& [key, value] : group.dict()) {
        if (key != "params") flat[std::string(kGroupPrefix) + fqn.str() + "." + key] = value;
      }
    }
  }
  return flat;
}

StateDict nested_form(const StateDict& state, const std::vector<torch::optim::Optimizer*>& optimizers,
                      const ModelView& view, bool strict) {
  FSDP2_CHECK(!state.empty(), kInvalidArgument,
              "[dcp] the optimizer state dict is empty; pass what get_optimizer_state_dict gives, or nothing to do is "
              "not to call");
  const bool has_state = state.contains("state"), has_groups = state.contains("param_groups");
  if (!has_state && !has_groups) {
    const std::string& key = state.begin()->first;
    const bool flat = key.starts_with(kStatePrefix) || key.starts_with(kGroupPrefix);
    FSDP2_CHECK(flat, kInvalidArgument,
                "[dcp] an optimizer state dict has the keys \"state\" and \"param_groups\", or ",
                "keys that start with them and a dot; this one has '", key, "'");
    return FlatReader(state, view).nested(optimizers, view, strict);
  }
  FSDP2_CHECK(has_groups, kNotFound, "[dcp] the optimizer state dict has no \"param_groups\"");
  std::vector<Value> groups = state.at("param_groups").list();
  // A load takes everything out of a group that the checkpoint does not have.
  std::erase_if(groups, [](const Value& group) { return group.dict().empty(); });
  for (size_t g = 0; g < groups.size(); ++g) {
    FSDP2_CHECK(groups[g].dict().contains("params"), kNotFound, "[dcp] group ", g,
                " of the optimizer state dict has no \"params\", the list of its parameters");
  }
  if (is_by_number(groups)) return from_numbers(state, optimizers, view);
  StateDict result{{"state", StateDict()}, {"param_groups", groups}};
  if (has_state) result["state"] = state.at("state");
  return result;
}

}  // namespace fsdp2::dcp::detail
