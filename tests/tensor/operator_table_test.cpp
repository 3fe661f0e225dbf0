// labels: ranks
// backends: gloo, shm
// timeout: 120

// Every operator of the dispatcher either is in the table, with values that are compared to the unsharded ones here, or
// refuses DTensors.

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include <fsdp2/device_mesh.h>
#include <fsdp2/error.h>

#include "support/ranks.h"
#include "tensor/operator_cases.h"
#include "tensor/operators.h"

namespace fsdp2::testing {
namespace {

/// Operators that a CPU cannot run, or whose work shows elsewhere; each has its own test or cannot have one here.
const std::set<std::string> kNoValueHere{
    "aten::pin_memory",     // needs an accelerator
    "aten::record_stream",  // needs an accelerator
    "aten::set_data",       // dtensor_test.cpp
    "aten::_backward",      // autograd_test.cpp
    "aten::retain_grad",    // autograd_test.cpp
    "aten::_version",       // counts writes to this tensor
    "aten::empty_like",     // no values
};

/// These read the size, dtype or device of one argument and leave it at that; a plain tensor beside a DTensor is fine.
const std::set<std::string> kReadsNoValues{
    "aten::type_as", "aten::to.other", "aten::is_same_size", "aten::result_type.Tensor",
    "aten::_backward",  // differentiates a plain result with respect to DTensors
};

std::vector<CaseLayout> layouts_for(const c10::OperatorHandle& op) {
  const std::vector<CaseLayout> matrices{
      {{17, 5}, Shard{0}}, {{1, 8}, Shard{0}}, {{5, 7}, Shard{1}}, {{4, 3}, Replicate{}}};
  const std::vector<CaseLayout> vectors{{{17}, Shard{0}}, {{1}, Shard{0}}, {{4}, Replicate{}}};
  const std::vector<CaseLayout> single{{{1}, Shard{0}}, {{1, 1}, Shard{1}}, {{1, 1}, Replicate{}}};
  if (operator_text(op) == "aten::_local_scalar_dense") return single;  // reads the first of many
  if (find_options(op, {17, 5}).has_value()) return matrices;
  if (find_options(op, {17}).has_value()) return vectors;
  return single;
}

void values_equal_the_unsharded_ones() {
  at::NoGradGuard no_grad;
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {get_world_size()});
  std::vector<std::string> failures;
  size_t compared = 0;
  for (const auto& row : detail::operator_rows()) {
    const auto found = c10::Dispatcher::singleton().findSchema({row.name, row.overload});
    if (!found.has_value()) {
      failures.push_back(c10::str(row.name, ".", row.overload, ": the dispatcher has no such operator"));
      continue;
    }
    const auto op = *found;
    const auto text = operator_text(op);
    if (kNoValueHere.count(text) != 0) continue;
    for (const auto& layout : layouts_for(op)) {
      const auto options = find_options(op, layout.sizes);
      if (!options.has_value()) {
        failures.push_back(text + ": no arguments found with which it runs on plain tensors");
        break;
      }
      const auto plain = plain_arguments(op.schema(), *options);
      auto expected_args = copy_of(plain);
      auto actual_args = distributed_arguments(plain, mesh, layout.placement);
      auto expected = expected_args, actual = actual_args;
      at::manual_seed(11);
      op.callBoxed(expected);
      at::manual_seed(11);
      std::string problem;
      try {
        op.callBoxed(actual);
        for (size_t index = 0; index < expected.size() && problem.empty(); ++index) {
          problem = difference(actual[index], expected[index]);
        }
        // What was written, too.
        for (size_t index = 0; index < plain.size() && problem.empty(); ++index) {
          const auto* alias = op.schema().arguments()[index].alias_info();
          if (alias != nullptr && alias->isWrite()) problem = difference(actual_args[index], expected_args[index]);
        }
      } catch (const std::exception& error) {
        problem = error.what();
      }
      ++compared;
      if (!problem.empty()) {
        failures.push_back(c10::str(text, " on ", c10::IntArrayRef(layout.sizes), " ", to_string(layout.placement),
                                    ", ", options->dtype, ": ", problem.substr(0, 600)));
      }
    }
  }
  EXPECT_GT(compared, 2000U);
  EXPECT_TRUE(failures.empty()) << failures.size() << " failures, the first:\n"
                                << [&] {
                                     std::string all;
                                     for (const auto& failure : failures) all += failure + "\n";
                                     return all.substr(0, 20000);
                                   }();
}

RANKS_TEST(OperatorTable, ValuesOnOneRank, 1) { values_equal_the_unsharded_ones(); }
RANKS_TEST(OperatorTable, ValuesOnTwoRanks, 2) { values_equal_the_unsharded_ones(); }
RANKS_TEST(OperatorTable, ValuesOnThreeRanks, 3) { values_equal_the_unsharded_ones(); }

/// Calls the operator with a DTensor in one argument and says what it did.
std::string outcome(const c10::OperatorHandle& op, torch::jit::Stack stack) {
  try {
    op.callBoxed(stack);
    return "computed";
  } catch (const Error& error) {
    const std::string message = error.what();
    if (message.find(operator_text(op)) != std::string::npos) return "refused";
    return "an error that does not name it: " + message;
  } catch (const std::exception& error) {
    return std::string("another error: ") + std::string(error.what()).substr(0, 200);
  }
}

// One rank is enough: operators refuse before they communicate.
RANKS_TEST(OperatorTable, EverythingElseRefusesDTensors, 1) {
  at::NoGradGuard no_grad;
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {1});
  CaseOptions options;
  options.sizes = {4, 3};
  const Tensor marked = distribute(sample(options, at::kFloat, 1), mesh, Shard{0});
  const Tensor plain = sample(options, at::kFloat, 2);

  std::vector<std::string> failures;
  size_t refused = 0, without_tensors = 0, in_table = 0;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto found = c10::Dispatcher::singleton().findOp(name);
    if (!found.has_value() || !found->hasSchema()) continue;
    const auto& op = *found;
    const auto& schema = op.schema();
    if (!takes_tensors(schema)) {
      ++without_tensors;
      continue;
    }
    const bool listed = detail::find_operator(op) != nullptr;
    in_table += listed ? 1 : 0;
    size_t num_tensors = 0;
    for (const auto& argument : schema.arguments()) {
      num_tensors += is_tensor_type(argument.type()) || is_tensor_list_type(argument.type()) ? 1 : 0;
    }
    for (size_t position = 0; position < schema.arguments().size(); ++position) {
      const auto type = schema.arguments()[position].type();
      const bool list = is_tensor_list_type(type);
      if (!list && !is_tensor_type(type)) continue;
      // An operator of the table that meets a plain tensor beside the DTensor refuses as well.
      if (listed && (num_tensors < 2 || kReadsNoValues.count(operator_text(op)) != 0)) continue;
      torch::jit::Stack stack;
      for (size_t index = 0; index < schema.arguments().size(); ++index) {
        const auto& argument = schema.arguments()[index];
        const Tensor& tensor = index == position ? marked : plain;
        if (is_tensor_list_type(argument.type())) {
          stack.emplace_back(std::vector<Tensor>{plain, tensor});
        } else if (is_tensor_type(argument.type())) {
          stack.emplace_back(tensor);
        } else {
          stack.push_back(other_value(argument, options));
        }
      }
      const auto did = outcome(op, std::move(stack));
      if (did == "refused") {
        ++refused;
      } else {
        failures.push_back(c10::str(operator_text(op), " argument ", schema.arguments()[position].name(), ": ", did));
      }
    }
  }
  ::testing::Test::RecordProperty("operators_in_table", static_cast<int>(in_table));
  ::testing::Test::RecordProperty("operators_without_tensors", static_cast<int>(without_tensors));
  ::testing::Test::RecordProperty("refusals", static_cast<int>(refused));
  EXPECT_GT(refused, 4000U);
  std::string all;
  for (const auto& failure : failures) all += failure + "\n";
  EXPECT_TRUE(failures.empty()) << failures.size() << " failures:\n" << all.substr(0, 20000);
}

}  // namespace
}  // namespace fsdp2::testing
