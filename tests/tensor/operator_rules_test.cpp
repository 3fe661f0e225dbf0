// labels: ranks
// backends: gloo, shm

// What every operator of the table does with gradients, with two layouts and with Partial values.

#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>
#include <string>

#include <fsdp2/device_mesh.h>
#include <fsdp2/error.h>

#include "support/ranks.h"
#include "tensor/operator_cases.h"
#include "tensor/operators.h"

namespace fsdp2::testing {
namespace {

const std::set<std::string> kNeedsAccelerator{"aten::pin_memory", "aten::record_stream"};

/// Visits every operator of the table with plain arguments on which it runs.
template <class Visit>
void for_each_operator(Visit&& visit) {
  for (const auto& row : detail::operator_rows()) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(row.name, row.overload);
    if (kNeedsAccelerator.count(operator_text(op)) != 0) continue;
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{6, 4}, {6}, {1}}) {
      at::NoGradGuard no_grad;
      const auto options = find_options(op, sizes);
      if (!options.has_value()) continue;
      at::AutoGradMode grad(true);
      visit(op, row, *options);
      break;
    }
  }
}

std::string error_of(const c10::OperatorHandle& op, torch::jit::Stack stack) {
  try {
    op.callBoxed(stack);
    return "";
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("not ours: ") + error.what();
  }
}

void expect_none(const std::vector<std::string>& failures) {
  std::string all;
  for (const auto& failure : failures) all += failure + "\n";
  EXPECT_TRUE(failures.empty()) << failures.size() << " failures:\n" << all.substr(0, 20000);
}

/// Right without a gradient, or with one of their own.
const std::set<std::string> kRunsWithGrad{
    "aten::detach", "aten::contiguous", "aten::to.dtype", "aten::to.dtype_layout", "aten::to.device", "aten::to.other",
    "aten::_to_copy", "aten::type_as", "aten::requires_grad_", "aten::detach_", "aten::is_leaf", "aten::output_nr",
    "aten::_version", "aten::retain_grad", "aten::retains_grad", "aten::size.int", "aten::sym_size.int",
    "aten::stride.int", "aten::sym_stride.int", "aten::sym_numel", "aten::is_same_size", "aten::is_floating_point",
    "aten::is_complex", "aten::is_signed", "aten::is_conj", "aten::is_neg", "aten::is_inference",
    "aten::_has_compatible_shallow_copy_type", "aten::result_type.Tensor", "aten::result_type.Scalar",
    "aten::result_type.Scalar_Tensor", "aten::set_data", "aten::_backward"};

RANKS_TEST(OperatorRules, NothingLosesAGradient, 1) {
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {1});
  std::vector<std::string> failures;
  size_t refused = 0;
  for_each_operator([&](const c10::OperatorHandle& op, const detail::OperatorRow&, const CaseOptions& options) {
    if (!at::isFloatingType(options.dtype) || kRunsWithGrad.count(operator_text(op)) != 0) return;
    auto args = distributed_arguments(plain_arguments(op.schema(), options), mesh, Shard{0});
    bool any = false;
    const auto mark = [&](const Tensor& tensor) {
      if (!is_dtensor(tensor) || !at::isFloatingType(tensor.scalar_type())) return;
      tensor.set_requires_grad(true);
      any = true;
    };
    for (auto& value : args) {
      if (value.isTensor()) mark(value.toTensor());
      if (!value.isTensorList()) continue;
      for (const Tensor& tensor : value.toTensorVector()) mark(tensor);
    }
    if (!any) return;
    const auto text = error_of(op, args);
    ++refused;
    if (text.find("requires grad") == std::string::npos) failures.push_back(operator_text(op) + ": " + text);
  });
  EXPECT_GT(refused, 500U);
  expect_none(failures);
}

RANKS_TEST(OperatorRules, TwoLayoutsAreRefused, 1) {
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {1});
  const std::set<std::string> kMetadataOnly{"aten::to.other", "aten::type_as", "aten::is_same_size", "aten::set_data",
                                            "aten::_has_compatible_shallow_copy_type", "aten::result_type.Tensor",
                                            "aten::_backward"};
  std::vector<std::string> failures;
  size_t refused = 0;
  for_each_operator([&](const c10::OperatorHandle& op, const detail::OperatorRow&, const CaseOptions& options) {
    if (kMetadataOnly.count(operator_text(op)) != 0) return;
    at::NoGradGuard no_grad;
    const auto plain = plain_arguments(op.schema(), options);
    auto args = distributed_arguments(plain, mesh, Shard{0});
    const auto other = distributed_arguments(plain, mesh, Replicate{});
    size_t num_marked = 0;
    for (size_t index = 0; index < args.size(); ++index) {
      const bool tensors = (args[index].isTensor() && is_dtensor(args[index].toTensor())) || args[index].isTensorList();
      if (tensors && ++num_marked == 2) args[index] = other[index];
    }
    if (num_marked < 2) return;
    ++refused;
    const auto text = error_of(op, args);
    if (text.find("layout") == std::string::npos) failures.push_back(operator_text(op) + ": " + text);
  });
  EXPECT_GT(refused, 200U);
  expect_none(failures);
}

/// Terms of a sum over the ranks; no term is the whole divided by the number of ranks.
Tensor as_partial(const Tensor& full, const DeviceMesh& mesh) {
  if (!full.defined() || full.dim() == 0) return full;
  const double weight = 2.0 * (get_rank() + 1) / (get_world_size() * (get_world_size() + 1.0));
  const Tensor term = at::isFloatingType(full.scalar_type()) ? full.mul(weight) : full.clone();
  return detail::make_dtensor(term, mesh, {Partial{}}, full.sizes().vec(), "w");
}

torch::jit::Stack partial_arguments(const torch::jit::Stack& plain, const DeviceMesh& mesh) {
  torch::jit::Stack stack;
  for (const auto& value : plain) {
    if (value.isTensor()) {
      stack.emplace_back(as_partial(value.toTensor(), mesh));
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(as_partial(tensor, mesh));
      stack.emplace_back(tensors);
    } else {
      stack.push_back(value);
    }
  }
  return stack;
}

Tensor whole(const Tensor& tensor) { return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor; }

RANKS_TEST(OperatorRules, PartialIsRightOrRefused, 2) {
  at::NoGradGuard no_grad;
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {2});
  const std::set<std::string> kNoValue{"aten::empty_like", "aten::set_data", "aten::_backward", "aten::_version",
                                       "aten::retain_grad"};
  std::vector<std::string> failures;
  std::set<std::string> right;
  for_each_operator([&](const c10::OperatorHandle& op, const detail::OperatorRow&, const CaseOptions& options) {
    if (kNoValue.count(operator_text(op)) != 0) return;
    at::NoGradGuard off;
    const auto plain = plain_arguments(op.schema(), options);
    auto expected = copy_of(plain);
    auto actual = partial_arguments(plain, mesh);
    const auto actual_args = actual;
    op.callBoxed(expected);
    std::string problem;
    try {
      op.callBoxed(actual);
      for (size_t index = 0; index < expected.size() && problem.empty(); ++index) {
        if (expected[index].isTensor() && is_dtensor(actual[index].toTensor())) {
          if (!at::allclose(whole(actual[index].toTensor()), expected[index].toTensor(), 1e-5, 1e-6, true)) {
            problem = "another value";
          }
        } else if (!expected[index].isTensorList()) {
          problem = difference(actual[index], expected[index]);
        }
      }
      right.insert(operator_text(op));
    } catch (const Error& error) {
      const std::string text = error.what();
      if (text.find("synchronize_gradients()") == std::string::npos) problem = text;
    } catch (const std::exception& error) {
      problem = error.what();
    }
    if (!problem.empty()) failures.push_back(operator_text(op) + ": " + problem);
  });
  expect_none(failures);
  for (const char* linear : {"aten::zero_", "aten::detach", "aten::add.Tensor", "aten::sub_.Tensor", "aten::neg",
                             "aten::lerp.Scalar", "aten::mul.Scalar", "aten::div.Scalar", "aten::_foreach_zero_"}) {
    EXPECT_EQ(right.count(linear), 1U) << linear;
  }
  for (const char* refused : {"aten::add.Scalar", "aten::mul.Tensor", "aten::norm.Scalar", "aten::sum", "aten::clone",
                              "aten::addcmul", "aten::pow.Tensor_Scalar", "aten::fill_.Scalar", "aten::item",
                              "aten::normal_", "aten::_foreach_norm.Scalar", "aten::equal"}) {
    EXPECT_EQ(right.count(refused), 0U) << refused;
  }
}

RANKS_TEST(OperatorRules, PartialWithNumbers, 2) {
  at::NoGradGuard no_grad;
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {2});
  const Tensor sum = at::arange(1, 5, at::kFloat);
  const Tensor partial = as_partial(sum, mesh);
  // Each call by its own number: nothing of an earlier one is remembered.
  EXPECT_TRUE(at::allclose(whole(partial * -5), sum * -5));
  EXPECT_TRUE(at::allclose(whole(partial * 2), sum * 2));
  EXPECT_TRUE(at::allclose(whole(partial * at::full({}, 3.0)), sum * 3));
  EXPECT_TRUE(at::allclose(whole(partial / 4), sum / 4));
  EXPECT_FSDP2_ERROR(partial + 10, kUsage, "aten::add.Scalar");
  EXPECT_FSDP2_ERROR(10 / partial, kUsage, "Partial");
  EXPECT_FSDP2_ERROR(partial.norm(), kUsage, "aten::norm");
  EXPECT_FSDP2_ERROR(partial * partial, kUsage, "Partial");
  EXPECT_FSDP2_ERROR(partial.to(at::kLong), kUsage, "Partial");
  EXPECT_FSDP2_ERROR(distribute_tensor(sum, mesh, {Shard{0}}).tensor() + partial, kUsage, "synchronize_gradients()");
  const Tensor largest = from_local(sum * (rank + 1), mesh, {Partial{ReduceOp::MAX}}).tensor();
  EXPECT_TRUE(at::allclose(whole(largest), sum * 2));
  EXPECT_FSDP2_ERROR(largest * -1, kUsage, "Partial(max)");
}

}  // namespace
}  // namespace fsdp2::testing
