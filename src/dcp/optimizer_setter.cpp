#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include <algorithm>
#include <optional>

#include "dcp/local_parts.h"
#include "dcp/optimizer_state.h"
#include "tensor/dtensor_spec.h"

namespace fsdp2::dcp::detail {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

namespace {

/// How Python computes, not what.
bool is_without_effect(const std::string& key) {
  return key == "foreach" || key == "fused" || key == "capturable" || key == "differentiable";
}

void set_hyper_parameters(const OptimizerLayout& layout, OptimizerOptions& options, const StateDict& saved) {
  for (const auto& [key, value] : saved) {
    if (key != "params") layout.set_hyper_parameter(options, key, value);
  }
}

/// Says which hyper-parameters of one side the other lacks.
void note_differences(const OptimizerLayout& layout, const OptimizerOptions& options, const StateDict& saved,
                      size_t index) {
  const StateDict here = layout.hyper_parameters(options);
  std::string unused, kept;
  const auto add = [](std::string& list, const std::string& key) { list += (list.empty() ? "" : ", ") + key; };
  const std::unique_ptr<OptimizerOptions> trial = options.clone();
  for (const auto& [key, value] : saved) {
    if (key == "params" || is_without_effect(key) || layout.set_hyper_parameter(*trial, key, value)) continue;
    // A constant of ours, e.g. maximize: false.
    const bool same = here.contains(key) && here.at(key).kind() == Kind::Bool && value.kind() == Kind::Bool &&
                      here.at(key).boolean() == value.boolean();
    if (!same) add(unused, key);
  }
  for (const auto& [key, value] : here) {
    if (!saved.contains(key) && !is_without_effect(key)) add(kept, key);
  }
  if (!unused.empty())
    FSDP2_LOG_WARN("[dcp] hyper-parameters that group ", index,
                   " has in the state dict have no counterpart in this optimizer and are not used: ", unused);
  if (!kept.empty())
    FSDP2_LOG_WARN("[dcp] the state dict lacks hyper-parameters of group ", index, ", which keep their values: ", kept);
}

bool has(const StateDict& saved, const std::string& field) {
  return saved.contains(field) && !saved.at(field).is_none();  // Python's SGD keeps a None until its first step
}

int64_t step_of(const Value& value, const std::string& where) {
  const bool tensor = value.kind() == Kind::Tensor;
  FSDP2_CHECK(!tensor || value.tensor().numel() == 1, kInvalidArgument, "[dcp] ", where, " has ",
              value.tensor().numel(), " elements; a step is one number");
  return tensor ? static_cast<int64_t>(value.tensor().item<double>()) : static_cast<int64_t>(value.number());
}

/// Into the tensor that the optimizer has, or a new one.
void put_field(at::Tensor& target, const at::Tensor& param, const at::Tensor& value, const std::string& where,
               bool own) {
  const bool keep =
      target.defined() && !on_meta(target) && fsdp2::detail::is_marked(target) == fsdp2::detail::is_marked(param);
  if (keep) {
    assign_tensor(target, value, where, /*may_take_over=*/false);
  } else {
    target = in_layout_of(param, value, where, own);
  }
}

}  // namespace

void OptimizerSetter::plan(const StateDict& state, ValueSource& source) {
  state_ = &state.at("state").dict();
  for (const Value& group : state.at("param_groups").list()) groups_.push_back(&group.dict());
  index_groups();
  for (Optimizer* optimizer : optimizers_) {
    for (size_t g = 0; g < optimizer->param_groups().size(); ++g) plan_group(*optimizer, g, source);
  }
  FSDP2_CHECK(found_ > 0 || state_->empty() || absent_ == 0 || !options_.strict, kNotFound,
              "[dcp] the optimizer state dict has state for no parameter of the optimizer; its first key is ",
              state_->empty() ? "" : state_->begin()->first, ", the first parameter ", first_absent_);
}

void OptimizerSetter::index_groups() {
  for (size_t i = 0; i < groups_.size(); ++i) {
    const std::vector<Value>& params = groups_[i]->at("params").list();
    for (const Value& fqn : params) group_of_.emplace(fqn.str(), i);
    if (params.empty()) empty_groups_.push_back(i);
  }
  size_t empty_here = 0;
  for (const Optimizer* optimizer : optimizers_) {
    for (const OptimizerParamGroup& group : optimizer->param_groups()) empty_here += group.params().empty();
  }
  if (empty_here != empty_groups_.size()) empty_groups_.clear();
}

void OptimizerSetter::plan_group(Optimizer& optimizer, size_t index, ValueSource& source) {
  OptimizerParamGroup& group = optimizer.param_groups()[index];
  const OptimizerLayout& layout = layout_of(group.options());
  // What the options will be decides which state there must be.
  const std::unique_ptr<OptimizerOptions> options = group.options().clone();
  if (const StateDict* saved = saved_group(group, index)) {
    note_differences(layout, *options, *saved, index);
    set_hyper_parameters(layout, *options, *saved);
    hyper_parameters_.emplace_back(&group, saved);
  }
  for (size_t i = 0; i < group.params().size(); ++i) {
    const at::Tensor& param = group.params()[i];
    const auto* names = view_.names(param, c10::str("parameter ", i, " of group ", index, " of the optimizer"));
    if (names != nullptr) plan_param(optimizer, group, *options, param, *names, source);
  }
}

const StateDict* OptimizerSetter::saved_group(const OptimizerParamGroup& group, size_t index) {
  if (group.params().empty()) {
    if (next_empty_ < empty_groups_.size()) return groups_[empty_groups_[next_empty_++]];
    FSDP2_LOG_WARN("[dcp] group ", index,
                   " of the optimizer has no parameters, and the state dict another number of such groups; it keeps "
                   "its hyper-parameters");
    return nullptr;
  }
  std::optional<size_t> found;
  std::string first, lost;
  bool selected = false;
  for (const at::Tensor& param : group.params()) {
    const auto* names = view_.names(param, "a parameter of the optimizer");
    if (names == nullptr) continue;
    selected = true;
    const auto name =
        std::find_if(names->begin(), names->end(), [&](const std::string& fqn) { return group_of_.count(fqn) != 0; });
    if (name == names->end()) {
      if (lost.empty()) lost = names->front();
      continue;
    }
    const size_t saved = group_of_.at(*name);
    FSDP2_CHECK(!found || *found == saved, kInvalidArgument, "[dcp] group ", index, " of the optimizer has ", first,
                " of group ", found.value_or(0), " and ", *name, " of group ", saved,
                " of the state dict; group the parameters as they were saved");
    if (!found) first = *name;
    found = saved;
  }
  if (!found && selected) {
    FSDP2_LOG_WARN("[dcp] group ", index, " of the optimizer (", lost,
                   ", ...) is in no group of the state dict; it keeps its hyper-parameters");
  } else if (!lost.empty()) {
    FSDP2_LOG_WARN("[dcp] ", lost, " of group ", index, " of the optimizer is in no group of the state dict; it gets ",
                   "the hyper-parameters of ", first);
  }
  return found ? groups_[*found] : nullptr;
}

bool OptimizerSetter::is_complete(const StateDict& saved, const OptimizerLayout& layout,
                                  const std::vector<std::string>& fields, const std::string& fqn) const {
  std::string missing;
  const std::unique_ptr<OptimizerParamState> example = layout.make_state();
  if (layout.step(*example) != nullptr && !has(saved, "step")) missing = "step";
  for (const std::string& field : fields) {
    if (missing.empty() && !has(saved, field)) missing = field;
  }
  if (missing.empty()) return true;
  FSDP2_CHECK(!options_.strict, kNotFound, "[dcp] the optimizer state of ", fqn, " has no ", missing,
              "; the state dict is incomplete or of an optimizer with other options (strict = false starts afresh)");
  FSDP2_LOG_WARN("[dcp] the optimizer state of ", fqn, " has no ", missing, "; it starts afresh");
  return false;
}

void OptimizerSetter::plan_param(Optimizer& optimizer, const OptimizerParamGroup& group,
                                 const OptimizerOptions& options, const at::Tensor& param,
                                 const std::vector<std::string>& names, ValueSource& source) {
  const OptimizerLayout& layout = layout_of(options);
  const std::vector<std::string> fields = layout.fields(options);
  if (fields.empty()) return;
  const auto name =
      std::find_if(names.begin(), names.end(), [&](const std::string& fqn) { return state_->contains(fqn); });
  const StateDict* saved = name == names.end() ? nullptr : &state_->at(*name).dict();
  const bool present = saved != nullptr && std::any_of(saved->begin(), saved->end(),
                                                       [](const auto& entry) { return !entry.second.is_none(); });
  if (!present && !param.requires_grad()) return;
  if (!present && absent_++ == 0) first_absent_ = names.front();
  if (present) ++found_;
  if (!present || !is_complete(*saved, layout, fields, *name)) {
    changes_.push_back({&optimizer, &group, param, names.front(), nullptr});
    return;
  }
  Change change{&optimizer, &group, param, *name, saved};
  if (has(*saved, "step")) change.step = step_of(saved->at("step"), "state." + *name + ".step");
  changes_.push_back(change);
  for (const std::string& field : fields) {
    const std::string where = "state." + *name + "." + field;
    FSDP2_CHECK(saved->at(field).kind() == Kind::Tensor, kInvalidArgument, "[dcp] ", where, " is of kind ",
                to_string(saved->at(field).kind()), "; a tensor is needed");
    const at::Tensor& value = saved->at(field).tensor();
    check_assignable(param, value, where);
    source.check_has_data(value, where);
    source.want(value, [&layout, &optimizer, param, field, where](const at::Tensor& arrived, bool own) {
      auto& slot = optimizer.state()[param.unsafeGetTensorImpl()];
      if (!slot) slot = layout.make_state();
      put_field(layout.field(*slot, field), param, arrived, where, own);
    });
  }
}

void OptimizerSetter::apply() {
  for (const auto& [group, saved] : hyper_parameters_) {
    set_hyper_parameters(layout_of(group->options()), group->options(), *saved);
  }
  for (const Change& change : changes_) {
    const OptimizerOptions& options = change.group->options();
    const OptimizerLayout& layout = layout_of(options);
    auto& states = change.optimizer->state();
    const void* key = change.param.unsafeGetTensorImpl();
    if (change.saved == nullptr) states.erase(const_cast<void*>(key));
    if (change.saved == nullptr && !layout.needs_state()) continue;
    auto& slot = states[const_cast<void*>(key)];
    if (!slot) slot = layout.make_state();
    if (int64_t* step = layout.step(*slot)) *step = change.step;
    if (change.saved != nullptr) continue;
    const StateDict fresh = read_state(layout, options, nullptr, change.param, change.fqn);
    for (const std::string& field : layout.fields(options)) layout.field(*slot, field) = fresh.at(field).tensor();
  }
  if (absent_ > 0) {
    FSDP2_LOG_WARN("[dcp] the state dict has no optimizer state for ", absent_, " parameters, e.g. ", first_absent_,
                   ", which had none yet when it was saved; they start afresh");
  }
}

}  // namespace fsdp2::dcp::detail
