// labels: ranks
// backends: gloo, shm

// Full reductions over dtypes and special values; the walk over the table covers the operators with one dtype each.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>

#include <fsdp2/device_mesh.h>
#include <fsdp2/error.h>
#include <fsdp2/tensor/dtensor.h>

#include "support/ranks.h"

namespace fsdp2 {
namespace {

using Reduction = std::function<Tensor(const Tensor&)>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

const std::vector<std::pair<const char*, Reduction>> kReductions{
    {"sum", [](const Tensor& t) { return t.sum(); }},
    {"sum in double", [](const Tensor& t) { return t.sum(torch::kDouble); }},
    {"sum over all dims", [](const Tensor& t) { return t.sum(at::IntArrayRef{0, -1}); }},
    {"mean in double", [](const Tensor& t) { return t.mean(torch::kDouble); }},
    {"prod", [](const Tensor& t) { return t.prod(); }},
    {"max", [](const Tensor& t) { return t.max(); }},
    {"min", [](const Tensor& t) { return t.min(); }},
    {"amax", [](const Tensor& t) { return t.amax(); }},
    {"any", [](const Tensor& t) { return t.any(); }},
    {"all", [](const Tensor& t) { return t.all(); }},
    {"finite", [](const Tensor& t) { return t.isfinite().all(); }},
    {"count_nonzero", [](const Tensor& t) { return t.count_nonzero(); }},
    {"norm", [](const Tensor& t) { return t.norm(); }},
    {"norm 0", [](const Tensor& t) { return t.norm(0); }},
    {"norm 1", [](const Tensor& t) { return t.norm(1); }},
    {"norm 2.5", [](const Tensor& t) { return torch::linalg_vector_norm(t, 2.5); }},
    {"norm inf", [](const Tensor& t) { return torch::linalg_vector_norm(t, kInfinity); }},
    {"norm -inf", [](const Tensor& t) { return torch::linalg_vector_norm(t, -kInfinity); }},
    {"norm in double", [](const Tensor& t) { return torch::linalg_vector_norm(t, 2, {}, false, torch::kDouble); }},
    {"foreach norm", [](const Tensor& t) { return at::_foreach_norm({t, t}, 3)[1]; }},
};

/// Every bit, so that no rank can go another way.
void expect_same_on_every_rank(const Tensor& value, const char* name) {
  const Tensor bytes = value.reshape({1}).view(torch::kByte).contiguous();
  const std::string mine(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  for (const auto& other : all_gather_strings(mine)) EXPECT_EQ(other, mine) << name;
}

void reductions_of(const Tensor& full, const DeviceMesh& mesh) {
  for (const Placement& placement : {Placement(Shard{0}), Placement(Shard{1}), Placement(Replicate{})}) {
    const Tensor tensor = distribute_tensor(full, mesh, {placement}).tensor();
    for (const auto& [name, reduction] : kReductions) {
      Tensor expected;
      try {
        expected = reduction(full);
      } catch (const std::exception&) {
        EXPECT_THROW(reduction(tensor), c10::Error) << name << " of " << full.scalar_type();
        continue;
      }
      const Tensor actual = reduction(tensor);
      ASSERT_FALSE(is_dtensor(actual));
      ASSERT_EQ(actual.dim(), 0);
      EXPECT_EQ(actual.scalar_type(), expected.scalar_type()) << name << " of " << full.scalar_type();
      const double tolerance = at::isReducedFloatingType(expected.scalar_type()) ? 1e-2 : 1e-5;
      const auto wide = [](const Tensor& value) {
        return value.is_complex() ? torch::view_as_real(value).to(torch::kDouble) : value.to(torch::kDouble);
      };
      EXPECT_TRUE(torch::allclose(wide(actual), wide(expected), tolerance, 1e-6, /*equal_nan=*/true))
          << name << " of " << full.scalar_type() << " " << full.sizes() << " " << to_string(placement) << ": "
          << actual << " instead of " << expected;
      expect_same_on_every_rank(actual, name);
    }
  }
}

void reductions() {
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {get_world_size()});
  torch::manual_seed(2);
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{7, 3}, {1, 5}}) {
    const Tensor values = torch::randn(sizes).mul(3);
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf, torch::kLong, torch::kInt,
                             torch::kByte, torch::kBool}) {
      reductions_of(values.abs().to(dtype), mesh);
      if (dtype != torch::kByte) reductions_of(values.to(dtype), mesh);
    }
    reductions_of(torch::complex(values, values + 1), mesh);
    reductions_of(torch::zeros(sizes), mesh);
    for (const double special : {kNaN, kInfinity, -kInfinity}) {
      Tensor with = values.clone();
      with[0][sizes[1] - 1] = special;
      reductions_of(with, mesh);
    }
  }
}

RANKS_TEST(Reductions, EqualUnshardedOnTwoRanks, 2) { reductions(); }
RANKS_TEST(Reductions, EqualUnshardedOnThreeRanks, 3) { reductions(); }

RANKS_TEST(Reductions, SingleValuesAndComparisons, 3) {
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {3});
  const Tensor one = distribute_tensor(torch::full({1, 1}, 2.5), mesh, {Shard{0}}).tensor();
  EXPECT_EQ(one.item<double>(), 2.5);
  EXPECT_TRUE(one.is_nonzero());
  const Tensor full = torch::arange(6, torch::kFloat).view({2, 3});
  const Tensor tensor = distribute_tensor(full, mesh, {Shard{0}}).tensor();
  EXPECT_FSDP2_ERROR(tensor.item<double>(), kInvalidArgument, "one element");
  EXPECT_TRUE(torch::equal(tensor, tensor.detach()));
  Tensor other = full.clone();
  other[1][2] = 0;
  EXPECT_FALSE(torch::equal(tensor, distribute_tensor(other, mesh, {Shard{0}}).tensor()));
  EXPECT_FSDP2_ERROR(torch::equal(tensor, full), kUsage, "aten::equal");
  const Tensor line = distribute_tensor(full.flatten().to(torch::kBFloat16), mesh, {Shard{0}}).tensor();
  EXPECT_EQ(line.dot(line).item<double>(), 55.0);
  EXPECT_FSDP2_ERROR(tensor.sum(0), kUnsupported, "aten::sum.dim_IntList");
  EXPECT_FSDP2_ERROR(tensor.mean(at::IntArrayRef{0, 1}, true), kUnsupported, "keepdim");
  EXPECT_FSDP2_ERROR(tensor.amax(1), kUnsupported, "aten::amax");
  EXPECT_FSDP2_ERROR(torch::linalg_vector_norm(tensor, 2, at::IntArrayRef{1}), kUnsupported, "linalg_vector_norm");
  EXPECT_FSDP2_ERROR(tensor.max(0), kUnsupported, "aten::max.dim");
  EXPECT_FSDP2_ERROR(tensor.std(), kUnsupported, "aten::std");
  const Tensor meta = distribute_tensor(torch::empty({2, 3}, torch::kMeta), mesh, {Shard{0}}).tensor();
  EXPECT_TRUE(meta.sum().is_meta() && meta.norm().is_meta() && meta.any().is_meta());
}

}  // namespace
}  // namespace fsdp2
