#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/modules.h>

#include <functional>
#include <mutex>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>

#include <fsdp2/error.h>
#include <fsdp2/meta_init.h>
#include <fsdp2/module.h>

#include "fsdp/module_state.h"
#include "fsdp/reshard_all.h"
#include "module/written.h"
#include "tensor/random.h"
#include "tensor/redistribute.h"

namespace fsdp2 {

namespace detail {

namespace {

std::mutex types_mutex;

std::unordered_map<std::type_index, void (*)(torch::nn::Module&)>& declared_types() {
  static auto* types = new std::unordered_map<std::type_index, void (*)(torch::nn::Module&)>();
  return *types;
}

}  // namespace

void register_reset(std::type_index type, void (*reset)(torch::nn::Module&)) {
  const std::lock_guard lock(types_mutex);
  declared_types().insert_or_assign(type, reset);
}

}  // namespace detail

namespace {

using at::Tensor;
namespace nn = torch::nn;

template <class... Stock>
bool try_stock(nn::Module& module, std::function<void()>& reset) {
  const auto one = [&]<class Impl>(Impl* typed) {
    if (typed != nullptr) {
      reset = [typed] { typed->reset_parameters(); };
    }
    return typed != nullptr;
  };
  return (one(dynamic_cast<Stock*>(&module)) || ...);
}

/// How to write `module`'s own tensors anew; empty where nobody said how.
std::function<void()> reset_of(nn::Module& module) {
  {
    const std::lock_guard lock(detail::types_mutex);
    const auto declared = detail::declared_types().find(typeid(module));
    if (declared != detail::declared_types().end()) {
      return [&module, function = declared->second] { function(module); };
    }
  }
  if (auto* own = dynamic_cast<ResetParameters*>(&module)) {
    return [own] { own->reset_parameters(); };
  }
  std::function<void()> reset;
  if (try_stock<nn::LinearImpl, nn::BilinearImpl, nn::EmbeddingImpl, nn::EmbeddingBagImpl, nn::LayerNormImpl,
                nn::GroupNormImpl, nn::Conv1dImpl, nn::Conv2dImpl, nn::Conv3dImpl, nn::ConvTranspose1dImpl,
                nn::ConvTranspose2dImpl, nn::ConvTranspose3dImpl, nn::BatchNorm1dImpl, nn::BatchNorm2dImpl,
                nn::BatchNorm3dImpl, nn::InstanceNorm1dImpl, nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl,
                nn::RNNImpl, nn::LSTMImpl, nn::GRUImpl, nn::RNNCellImpl, nn::LSTMCellImpl, nn::GRUCellImpl,
                nn::AdaptiveLogSoftmaxWithLossImpl>(module, reset)) {
    return reset;
  }
  if (auto* attention = dynamic_cast<nn::MultiheadAttentionImpl*>(&module)) {
    return [attention] { attention->_reset_parameters(); };
  }
  if (auto* prelu = dynamic_cast<nn::PReLUImpl*>(&module)) {
    return [prelu] {
      const at::NoGradGuard no_grad;
      prelu->weight.fill_(prelu->options.init());
    };
  }
  if (auto* transformer = dynamic_cast<nn::TransformerImpl*>(&module)) {
    return [transformer] { transformer->reset_parameters(); };
  }
  return reset;
}

std::vector<Tensor> tensors_of(const nn::Module& module, bool recurse) {
  std::vector<Tensor> tensors = module.parameters(recurse);
  for (Tensor& buffer : module.buffers(recurse)) {
    tensors.push_back(std::move(buffer));
  }
  std::erase_if(tensors, [](const Tensor& tensor) { return !tensor.defined(); });
  return tensors;
}

using Impls = std::unordered_set<const c10::TensorImpl*>;

/// Shows sharded tensors whole, for a module's own reset to write into; keeps this rank's part afterwards.
class WholeWhileReset {
 public:
  /// `finished`: written by an earlier owner. `fresh`: without values so far.
  WholeWhileReset(const std::vector<Tensor>& tensors, const Impls& finished, const Impls& fresh) {
    const c10::InferenceMode normal_tensors(false);
    const at::NoGradGuard no_grad;
    for (const Tensor& tensor : tensors) {
      // A tied tensor keeps the values of its first owner: a later owner writes into scratch.
      const bool scratch = finished.count(tensor.unsafeGetTensorImpl()) != 0;
      if (!detail::is_marked(tensor) && !scratch) {
        continue;
      }
      Entry& entry = entries_.emplace_back();
      entry.tensor = tensor;
      entry.scratch = scratch;
      const detail::BelowDTensor below;
      if (detail::is_marked(tensor)) {
        entry.own = detail::make_dtensor_alias(tensor);
        const detail::DTensorSpec& spec = *detail::spec_of(tensor);
        // A reset may write a part, or nothing: what it leaves alone keeps its values.
        const bool has_values = !scratch && fresh.count(tensor.unsafeGetTensorImpl()) == 0;
        entry.whole = has_values ? detail::gather_full(*spec.layout, spec.local, spec.fqn)
                                 : at::empty(tensor.sizes(), spec.local.options());
      } else {
        entry.own = tensor.variable_data();
        entry.whole = at::empty_like(entry.own);
      }
      tensor.unsafeGetTensorImpl()->shallow_copy_from(entry.whole.getIntrusivePtr());
    }
  }
  WholeWhileReset(const WholeWhileReset&) = delete;
  WholeWhileReset& operator=(const WholeWhileReset&) = delete;
  ~WholeWhileReset() { restore(); }

  void keep_parts() {
    const at::NoGradGuard no_grad;
    const detail::BelowDTensor below;
    for (Entry& entry : entries_) {
      if (entry.scratch || !detail::is_marked(entry.own)) {
        continue;
      }
      const detail::DTensorSpec& spec = *detail::spec_of(entry.own);
      detail::copy_own_part(spec.local, entry.tensor.variable_data(), *spec.layout);
    }
    restore();
  }

 private:
  struct Entry {
    Tensor tensor, own, whole;
    bool scratch = false;
  };
  void restore() {
    for (Entry& entry : entries_) {
      entry.tensor.unsafeGetTensorImpl()->shallow_copy_from(entry.own.getIntrusivePtr());
    }
    entries_.clear();
  }
  std::vector<Entry> entries_;
};

class Resetter {
 public:
  explicit Resetter(Impls fresh) : fresh_(std::move(fresh)) {}

  void visit(nn::Module& module, const std::string& fqn) {
    if (!seen_.insert(&module).second) {
      return;
    }
    for (const auto& child : module.named_children()) {
      visit(*child.value(), fqn.empty() ? child.key() : fqn + "." + child.key());
    }
    const std::vector<Tensor> own = tensors_of(module, false);
    const std::function<void()> reset = reset_of(module);
    if (!reset) {
      if (!own.empty()) {
        not_reset_ +=
            c10::str(not_reset_.empty() ? "" : ", ", fqn.empty() ? "the root" : fqn, " (", module.name(), ")");
      }
      return;
    }
    const std::vector<Tensor> tensors = own.empty() ? tensors_of(module, true) : own;
    const auto where = fqn.empty() ? module.name() : fqn;
    try {
      WholeWhileReset whole(tensors, own.empty() ? Impls{} : finished_, fresh_);
      reset();
      whole.keep_parts();
    } catch (const Error&) {
      throw;
    } catch (const c10::Error& error) {
      FSDP2_THROW(kInvalidArgument, "[meta] reset_parameters() of ", where,
                  " failed: ", error.what_without_backtrace());
    }
    for (const Tensor& tensor : tensors) {
      detail::forget_unwritten(tensor);
      finished_.insert(tensor.unsafeGetTensorImpl());
      fresh_.erase(tensor.unsafeGetTensorImpl());
    }
  }

  const std::string& not_reset() const { return not_reset_; }
  const Impls& finished() const { return finished_; }

 private:
  std::unordered_set<const nn::Module*> seen_;
  Impls finished_, fresh_;
  std::string not_reset_;
};

}  // namespace

void reset_parameters(ModuleRef module) {
  detail::reshard_all(*module);
  for (const Tensor& param : module->parameters()) {
    FSDP2_CHECK(!param.defined() || !param.is_meta(), kUsage, "[meta] reset_parameters: ", module->name(),
                " still has parameters on the meta device; call to_empty(model, device) first");
  }
  for (const Tensor& param : module->parameters()) {
    if (detail::is_marked(param)) {
      const detail::DTensorSpec& spec = *detail::spec_of(param);
      detail::check_generators_agree(at::globalContext().defaultGenerator(spec.local.device()), spec.mesh,
                                     "reset_parameters of " + module->name());
      break;
    }
  }
  Impls fresh;
  for (const auto& state : detail::states_under(*module)) {
    for (const auto& group : state->groups) {
      for (const detail::FSDPParam& param : group->params()) {
        if (param.awaits_write()) fresh.insert(param.param().unsafeGetTensorImpl());
      }
    }
  }
  Resetter resetter(std::move(fresh));
  resetter.visit(*module, "");
  for (const auto& state : detail::states_under(*module)) {
    for (const auto& group : state->groups) {
      group->mark_written(resetter.finished());
    }
  }
  FSDP2_CHECK(resetter.not_reset().empty(), kUsage, "[meta] reset_parameters cannot write ", resetter.not_reset(),
              "; declare the type with FSDP2_MODULE and give it reset_parameters(), or derive it from "
              "fsdp2::ResetParameters, or write its tensors and call mark_initialized(module)");
}

}  // namespace fsdp2
