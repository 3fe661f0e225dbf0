#include "tensor/autograd.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include <fsdp2/error.h>

#include "tensor/redistribute.h"
#include "torch_compat.h"

namespace fsdp2::detail {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

/// One gradient in, one out.
class DTensorNode : public Node {
 public:
  explicit DTensorNode(std::string fqn) : fqn_(std::move(fqn)) {}

  variable_list apply(variable_list&& grads) final {
    const Tensor& grad = grads.at(0);
    if (!grad.defined()) return {Tensor()};
    FSDP2_CHECK(!records_grad(grad), kUnsupported, "[dtensor] ", name(), " of '", fqn_,
                "' inside backward(create_graph=true): second derivatives of DTensors are not offered; take them of "
                "plain tensors");
    at::NoGradGuard no_grad;
    return {backward(grad)};
  }

 protected:
  virtual Tensor backward(const Tensor& grad) const = 0;

  const DTensorSpec& marked(const Tensor& grad) const {
    const auto* spec = spec_of(grad);
    FSDP2_CHECK(spec != nullptr, kUsage, "[dtensor] ", name(), " of '", fqn_, "' got a plain gradient of shape ",
                grad.sizes(), " where a DTensor belongs: pass backward() a DTensor, or differentiate a plain result "
                "(to_local(), full_tensor())");
    return *spec;
  }

  std::string fqn_;
};

/// The gradient of a value that was cut from, or gathered to, the layout that the source had.
class ToLocalBackward final : public DTensorNode {
 public:
  ToLocalBackward(std::shared_ptr<const DTensorLayout> layout, std::string fqn)
      : DTensorNode(std::move(fqn)), layout_(std::move(layout)) {}
  std::string name() const override { return "ToLocalBackward"; }

 protected:
  Tensor backward(const Tensor& grad) const override { return make_dtensor_over(layout_, grad, fqn_); }

 private:
  std::shared_ptr<const DTensorLayout> layout_;
};

class FullTensorBackward final : public DTensorNode {
 public:
  FullTensorBackward(std::shared_ptr<const DTensorLayout> layout, std::string fqn)
      : DTensorNode(std::move(fqn)), layout_(std::move(layout)) {}
  std::string name() const override { return "FullTensorBackward"; }

 protected:
  Tensor backward(const Tensor& grad) const override {
    BelowDTensor below;
    return make_dtensor_over(layout_, cut_for_this_rank(grad, *layout_), fqn_);
  }

 private:
  std::shared_ptr<const DTensorLayout> layout_;
};

class RedistributeBackward final : public DTensorNode {
 public:
  RedistributeBackward(std::shared_ptr<const DTensorLayout> layout, std::string fqn)
      : DTensorNode(std::move(fqn)), layout_(std::move(layout)) {}
  std::string name() const override { return "RedistributeBackward"; }

 protected:
  Tensor backward(const Tensor& grad) const override {
    const auto& spec = marked(grad);
    BelowDTensor below;
    return make_dtensor_over(layout_, redistribute_local(*spec.layout, spec.local, *layout_, fqn_), fqn_);
  }

 private:
  std::shared_ptr<const DTensorLayout> layout_;
};

/// Back to the plain local part; a gradient in another layout is brought into that of the result first.
class FromLocalBackward final : public DTensorNode {
 public:
  FromLocalBackward(std::shared_ptr<const DTensorLayout> layout, std::string fqn)
      : DTensorNode(std::move(fqn)), layout_(std::move(layout)) {}
  std::string name() const override { return "FromLocalBackward"; }

 protected:
  Tensor backward(const Tensor& grad) const override {
    const auto& spec = marked(grad);
    BelowDTensor below;
    return redistribute_local(*spec.layout, spec.local, *layout_, fqn_).detach();
  }

 private:
  std::shared_ptr<const DTensorLayout> layout_;
};

class CastBackward final : public DTensorNode {
 public:
  CastBackward(at::TensorOptions options, std::string fqn) : DTensorNode(std::move(fqn)), options_(options) {}
  std::string name() const override { return "CastBackward"; }

 protected:
  Tensor backward(const Tensor& grad) const override {
    const auto& spec = marked(grad);
    BelowDTensor below;
    return make_dtensor_like(spec, spec.local.to(options_));
  }

 private:
  at::TensorOptions options_;
};

void attach(Tensor& result, const Tensor& source, NodePtr node) {
  node->set_next_edges(torch::autograd::collect_next_edges(source));
  torch::autograd::set_history(result, node);
}

}  // namespace

bool records_grad(const Tensor& tensor) { return c10::GradMode::is_enabled() && tensor.requires_grad(); }

void attach_to_local(Tensor& result, const Tensor& source, const DTensorSpec& spec) {
  FSDP2_CHECK(!spec.has_partial(), kUnsupported, "[dtensor] to_local() of ", describe(spec), ", which requires grad: ",
              "the gradient of one term of a sum is not the gradient of the whole; redistribute it first");
  attach(result, source, make_node<ToLocalBackward>(spec.layout, spec.fqn));
}

void attach_full_tensor(Tensor& result, const Tensor& source, const DTensorSpec& spec) {
  attach(result, source, make_node<FullTensorBackward>(without_partial(spec.layout), spec.fqn));
}

void attach_redistribute(Tensor& result, const Tensor& source, const DTensorSpec& spec) {
  attach(result, source, make_node<RedistributeBackward>(without_partial(spec.layout), spec.fqn));
}

void attach_from_local(Tensor& result, const Tensor& source) {
  const auto& spec = *spec_of(result);
  attach(result, source, make_node<FromLocalBackward>(without_partial(spec.layout), spec.fqn));
}

void attach_cast(Tensor& result, const Tensor& source) {
  const auto& spec = *spec_of(source);
  const auto options = at::TensorOptions().dtype(source.scalar_type()).device(source.device());
  attach(result, source, make_node<CastBackward>(options, spec.fqn));
}

}  // namespace fsdp2::detail
