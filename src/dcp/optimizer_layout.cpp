#include "dcp/optimizer_layout.h"

#include <ATen/Functions.h>
#include <fsdp2/error.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <utility>

namespace fsdp2::dcp::detail {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

/// Python keeps a learning rate as a number or as a tensor of one element.
double number_of(const Value& value) {
  return value.kind() == Kind::Tensor ? value.tensor().item<double>() : value.number();
}

/// One hyper-parameter that libtorch has, or a constant that only Python has.
template <class Options>
struct HyperParameter {
  const char* key;
  std::function<Value(const Options&)> get;
  std::function<void(Options&, const Value&)> set;  // empty: only Python has it
};
template <class State>
struct StateTensor {
  const char* name;
  at::Tensor& (*get)(State&);
};

#define FSDP2_HYPER_NUMBER(Options, name)                                                                              \
  HyperParameter<Options> {                                                                                            \
#name, [](const Options& o) { return Value(o.name()); }, [](Options & o, const Value& v) { o.name(number_of(v)); } \
  }
#define FSDP2_HYPER_BOOL(Options, name)                                                                       \
  HyperParameter<Options> {                                                                                   \
#name, [](const Options& o) { return Value(o.name()); }, [](Options & o,                                  \
                                                                const Value& v) { o.name(v.integer() != 0); } \
  }
#define FSDP2_STATE_TENSOR(State, name)                      \
  StateTensor<State> {                                       \
#name, [](State & s) -> at::Tensor& { return s.name(); } \
  }

template <class Options>
HyperParameter<Options> python_only(const char* key, Value constant) {
  return {key, [constant](const Options&) { return constant; }, {}};
}

template <class Options, class State>
class LayoutOf : public OptimizerLayout {
 public:
  StateDict hyper_parameters(const OptimizerOptions& options) const override {
    StateDict result;
    for (const auto& item : hyper_) result[item.key] = item.get(static_cast<const Options&>(options));
    return result;
  }
  bool set_hyper_parameter(OptimizerOptions& options, const std::string& key, const Value& value) const override {
    for (const auto& item : hyper_) {
      if (item.key != key || !item.set) continue;
      item.set(static_cast<Options&>(options), value);
      return true;
    }
    return false;
  }
  std::unique_ptr<OptimizerParamState> make_state() const override { return std::make_unique<State>(); }
  at::Tensor& field(OptimizerParamState& state, const std::string& name) const override {
    for (const auto& item : tensors_) {
      if (item.name == name) return item.get(static_cast<State&>(state));
    }
    FSDP2_THROW(kNotFound, "[dcp] no optimizer state is called ", name);
  }
  int64_t* step(OptimizerParamState& state) const override {
    if constexpr (requires(State & s) { s.step(); }) {
      return &static_cast<State&>(state).step();
    } else {
      return nullptr;
    }
  }
  std::vector<std::string> fields(const OptimizerOptions& options) const override {
    return fields_(static_cast<const Options&>(options));
  }

 protected:
  std::vector<HyperParameter<Options>> hyper_;
  std::vector<StateTensor<State>> tensors_;
  std::function<std::vector<std::string>(const Options&)> fields_;
};

template <class Options, class State>
struct AdamLayout : LayoutOf<Options, State> {
  explicit AdamLayout(bool decoupled_weight_decay) {
    this->hyper_ = {
        FSDP2_HYPER_NUMBER(Options, lr),
        {"betas",
         [](const Options& o) {
           return Value::tuple({std::get<0>(o.betas()), std::get<1>(o.betas())});
         },
         [](Options& o, const Value& v) {
           FSDP2_CHECK(v.list().size() == 2, kInvalidArgument, "[dcp] betas of an optimizer state dict has ",
                       v.list().size(), " elements; there are two");
           o.betas({number_of(v.list()[0]), number_of(v.list()[1])});
         }},
        FSDP2_HYPER_NUMBER(Options, eps),
        FSDP2_HYPER_NUMBER(Options, weight_decay),
        FSDP2_HYPER_BOOL(Options, amsgrad),
        python_only<Options>("maximize", false),
        python_only<Options>("foreach", nullptr),
        python_only<Options>("capturable", false),
        python_only<Options>("differentiable", false),
        python_only<Options>("fused", nullptr),
        python_only<Options>("decoupled_weight_decay", decoupled_weight_decay),
    };
    this->tensors_ = {FSDP2_STATE_TENSOR(State, exp_avg), FSDP2_STATE_TENSOR(State, exp_avg_sq),
                      FSDP2_STATE_TENSOR(State, max_exp_avg_sq)};
    this->fields_ = [](const Options& o) {
      std::vector<std::string> names{"exp_avg", "exp_avg_sq"};
      if (o.amsgrad()) names.push_back("max_exp_avg_sq");
      return names;
    };
  }
};

using torch::optim::SGDOptions;
using torch::optim::SGDParamState;
struct SgdLayout : LayoutOf<SGDOptions, SGDParamState> {
  SgdLayout() {
    hyper_ = {
        FSDP2_HYPER_NUMBER(SGDOptions, lr),          FSDP2_HYPER_NUMBER(SGDOptions, momentum),
        FSDP2_HYPER_NUMBER(SGDOptions, dampening),   FSDP2_HYPER_NUMBER(SGDOptions, weight_decay),
        FSDP2_HYPER_BOOL(SGDOptions, nesterov),      python_only<SGDOptions>("maximize", false),
        python_only<SGDOptions>("foreach", nullptr), python_only<SGDOptions>("differentiable", false),
        python_only<SGDOptions>("fused", nullptr),
    };
    tensors_ = {FSDP2_STATE_TENSOR(SGDParamState, momentum_buffer)};
    fields_ = [](const SGDOptions& o) {
      return o.momentum() != 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
    };
  }
};

using torch::optim::AdagradOptions;
using torch::optim::AdagradParamState;
struct AdagradLayout : LayoutOf<AdagradOptions, AdagradParamState> {
  AdagradLayout() {
    hyper_ = {
        FSDP2_HYPER_NUMBER(AdagradOptions, lr),
        FSDP2_HYPER_NUMBER(AdagradOptions, lr_decay),
        FSDP2_HYPER_NUMBER(AdagradOptions, eps),
        FSDP2_HYPER_NUMBER(AdagradOptions, weight_decay),
        FSDP2_HYPER_NUMBER(AdagradOptions, initial_accumulator_value),
        python_only<AdagradOptions>("foreach", nullptr),
        python_only<AdagradOptions>("maximize", false),
        python_only<AdagradOptions>("differentiable", false),
        python_only<AdagradOptions>("fused", nullptr),
    };
    tensors_ = {FSDP2_STATE_TENSOR(AdagradParamState, sum)};
    fields_ = [](const AdagradOptions&) { return std::vector<std::string>{"sum"}; };
  }
  double initial_value(const OptimizerOptions& options) const override {
    return static_cast<const AdagradOptions&>(options).initial_accumulator_value();
  }
  bool needs_state() const override { return true; }
};

using torch::optim::RMSpropOptions;
using torch::optim::RMSpropParamState;
struct RmspropLayout : LayoutOf<RMSpropOptions, RMSpropParamState> {
  RmspropLayout() {
    hyper_ = {
        FSDP2_HYPER_NUMBER(RMSpropOptions, lr),           FSDP2_HYPER_NUMBER(RMSpropOptions, momentum),
        FSDP2_HYPER_NUMBER(RMSpropOptions, alpha),        FSDP2_HYPER_NUMBER(RMSpropOptions, eps),
        FSDP2_HYPER_BOOL(RMSpropOptions, centered),       FSDP2_HYPER_NUMBER(RMSpropOptions, weight_decay),
        python_only<RMSpropOptions>("capturable", false), python_only<RMSpropOptions>("foreach", nullptr),
        python_only<RMSpropOptions>("maximize", false),   python_only<RMSpropOptions>("differentiable", false),
    };
    tensors_ = {FSDP2_STATE_TENSOR(RMSpropParamState, square_avg),
                FSDP2_STATE_TENSOR(RMSpropParamState, momentum_buffer),
                FSDP2_STATE_TENSOR(RMSpropParamState, grad_avg)};
    fields_ = [](const RMSpropOptions& o) {
      std::vector<std::string> names{"square_avg"};
      if (o.momentum() > 0) names.push_back("momentum_buffer");
      if (o.centered()) names.push_back("grad_avg");
      return names;
    };
  }
};

}  // namespace

const OptimizerLayout& layout_of(const OptimizerOptions& options) {
  using torch::optim::AdamOptions;
  using torch::optim::AdamParamState;
  using torch::optim::AdamWOptions;
  using torch::optim::AdamWParamState;
  static const AdamLayout<AdamOptions, AdamParamState> adam(false);
  static const AdamLayout<AdamWOptions, AdamWParamState> adamw(true);
  static const SgdLayout sgd;
  static const AdagradLayout adagrad;
  static const RmspropLayout rmsprop;
  if (dynamic_cast<const AdamWOptions*>(&options)) return adamw;
  if (dynamic_cast<const AdamOptions*>(&options)) return adam;
  if (dynamic_cast<const SGDOptions*>(&options)) return sgd;
  if (dynamic_cast<const AdagradOptions*>(&options)) return adagrad;
  if (dynamic_cast<const RMSpropOptions*>(&options)) return rmsprop;
  FSDP2_THROW(kUnsupported, "[dcp] state dicts of an optimizer with options of type ",
              c10::demangle(typeid(options).name()), " are not offered; SGD, Adam, AdamW, Adagrad and RMSprop are");
}

}  // namespace fsdp2::dcp::detail
