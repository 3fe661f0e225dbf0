// labels: ranks
// backends: gloo, shm
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
#include <string>

#include <fsdp2/device_mesh.h>
#include <fsdp2/error.h>
#include <fsdp2/tensor/dtensor.h>

#include "support/ranks.h"
#include "tensor/dtensor_spec.h"

namespace fsdp2 {
namespace {

DeviceMesh world_mesh() { return init_device_mesh(c10::DeviceType::CPU, {get_world_size()}); }

Tensor counting(std::vector<int64_t> sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).view(sizes).sub(7).div(3);
}

void expect_equal(const Tensor& actual, const Tensor& expected) {
  ASSERT_FALSE(is_dtensor(actual));
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
  EXPECT_TRUE(at::equal(actual, expected)) << actual << "\n expected\n" << expected;
}

const std::vector<std::vector<int64_t>> kShapes{{17, 5}, {4, 3}, {1, 8}, {2}, {3, 0}, {5, 2, 3}};

void round_trips() {
  const auto mesh = world_mesh();
  for (const auto& sizes : kShapes) {
    const Tensor full = counting(sizes);
    std::vector<Placement> all{Replicate{}};
    for (int64_t dim = 0; dim < full.dim(); ++dim) all.push_back(Shard{dim});
    for (const auto& placement : all) {
      const auto tensor = distribute_tensor(get_rank() == 0 ? full : at::zeros_like(full), mesh, {placement});
      EXPECT_EQ(tensor.sizes(), full.sizes());
      EXPECT_EQ(tensor.strides(), full.strides());
      expect_equal(tensor.full_tensor(), full);
      if (const auto* shard = std::get_if<Shard>(&placement)) {
        const auto parts = full.chunk(get_world_size(), shard->dim);
        if (get_rank() < static_cast<int>(parts.size())) expect_equal(tensor.to_local(), parts[get_rank()]);
        else EXPECT_EQ(tensor.to_local().numel(), 0);
      }
      for (const auto& target : all) {
        const auto moved = tensor.redistribute({target});
        EXPECT_EQ(moved.placements(), std::vector<Placement>{target});
        expect_equal(moved.full_tensor(), full);
        EXPECT_EQ(moved.to_local().sizes(),
                  c10::IntArrayRef(detail::spec_of(moved.tensor())->layout->local_shape({get_rank()})));
      }
    }
  }
}

RANKS_TEST(DTensor, RoundTripsOnOneRank, 1) { round_trips(); }
RANKS_TEST(DTensor, RoundTripsOnTwoRanks, 2) { round_trips(); }
RANKS_TEST(DTensor, RoundTripsOnThreeRanks, 3) { round_trips(); }

RANKS_TEST(DTensor, StorageAccessThrows, 2) {
  const auto tensor = distribute_tensor(counting({4, 3}), world_mesh(), {Shard{0}}).tensor();
  EXPECT_THROW(tensor.data_ptr<float>(), c10::Error);
  EXPECT_THROW((tensor.add(1).data_ptr<float>()), c10::Error);
  EXPECT_THROW((tensor.accessor<float, 2>()), c10::Error);
  EXPECT_THROW(tensor.storage(), c10::Error);
  EXPECT_TRUE(tensor.is_contiguous());
}

RANKS_TEST(DTensor, TorchSaveThrows, 2) {
  torch::manual_seed(1);
  torch::nn::Linear layer(3, 4);
  std::ostringstream plain;
  torch::save(layer, plain);
  torch::nn::Linear again(3, 4);
  std::istringstream stream(plain.str());
  torch::load(again, stream);
  expect_equal(again->weight.detach(), layer->weight.detach());
  distribute_parameter(layer, "weight", world_mesh(), {Shard{0}});
  const auto text_of = [](auto&& save) -> std::string {
    try {
      save();
      return "no error";
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
  };
  std::ostringstream sharded;
  for (const auto& text : {text_of([&] { torch::save(layer, sharded); }), text_of([&] {
                             torch::save(layer->weight, sharded);
                           })}) {
    EXPECT_NE(text.find("'weight'"), std::string::npos) << text;
    EXPECT_NE(text.find("dcp::save"), std::string::npos) << text;
  }
  // Loading the whole into a sharded parameter would replace its data.
  std::istringstream whole(plain.str());
  EXPECT_FSDP2_ERROR(torch::load(layer, whole), kUsage, "'weight'");
  EXPECT_TRUE(is_dtensor(layer->weight));
}

RANKS_TEST(DTensor, ParameterStaysOneTensorImpl, 2) {
  torch::nn::Linear layer(3, 5);
  Tensor weight = layer->weight;
  auto* impl = weight.unsafeGetTensorImpl();
  const Tensor full = weight.detach().clone();
  distribute_parameter(layer, "weight", world_mesh(), {Shard{0}});
  EXPECT_EQ(layer->weight.unsafeGetTensorImpl(), impl);
  EXPECT_TRUE(is_dtensor(layer->weight));
  EXPECT_TRUE(layer->weight.is_leaf() && layer->weight.requires_grad());
  EXPECT_EQ(detail::spec_of(weight)->fqn.text(), "weight");
  EXPECT_FSDP2_ERROR(distribute_parameter(layer, "wait", world_mesh(), {Shard{0}}), kNotFound, "weight, bias");
  EXPECT_FSDP2_ERROR(layer->forward(at::ones({2, 3})), kUsage, "'weight'");
  // And back onto plain data.
  weight.unsafeGetTensorImpl()->shallow_copy_from(full.getIntrusivePtr());
  EXPECT_FALSE(is_dtensor(weight));
  EXPECT_EQ(weight.data_ptr<float>(), full.data_ptr<float>());
  layer->forward(at::ones({2, 3})).sum().backward();
  EXPECT_EQ(weight.grad().sizes(), weight.sizes());
}

RANKS_TEST(DTensor, ModuleToAnotherDtype, 2) {
  torch::manual_seed(1);
  torch::nn::Linear layer(3, 5);
  const Tensor full = layer->weight.detach().clone(), weight = layer->weight;
  distribute_parameter(layer, "weight", world_mesh(), {Shard{0}});
  layer->to(at::kDouble);
  EXPECT_TRUE(weight.is_same(layer->weight) && is_dtensor(weight));
  EXPECT_TRUE(weight.is_leaf() && weight.requires_grad());
  EXPECT_EQ(weight.scalar_type(), at::kDouble);
  expect_equal(DTensor(weight.detach()).full_tensor(), full.to(at::kDouble));
  layer->to(at::kDouble);  // nothing to do
  expect_equal(DTensor(weight.detach()).full_tensor(), full.to(at::kDouble));
  Tensor data = weight.data();
  EXPECT_TRUE(is_dtensor(data) && !data.requires_grad());
  EXPECT_FSDP2_ERROR(data.set_data(full), kUsage, "plain tensor of shape [5, 3]");
  data.set_data(distribute_tensor(full, world_mesh(), {Shard{0}}).tensor());
  expect_equal(DTensor(data).full_tensor(), full);
}

RANKS_TEST(DTensor, MadeInInferenceModeTakesPartInTraining, 2) {
  torch::nn::Linear layer(3, 4);
  {
    c10::InferenceMode inference;
    distribute_parameter(layer, "weight", world_mesh(), {Shard{0}});
  }
  EXPECT_FALSE(layer->weight.is_inference());
  EXPECT_FALSE(detail::local_of(layer->weight).is_inference());
  DTensor(layer->weight).full_tensor().pow(2).sum().backward();
  torch::NoGradGuard no_grad;
  layer->weight.add_(layer->weight.grad());
}

RANKS_TEST(DTensor, FromLocalGathersUnevenShapes, 2) {
  const Tensor local = at::full({rank == 0 ? 3 : 1, 2}, rank + 1.0);
  const auto tensor = from_local(local, world_mesh(), {Shard{0}});
  EXPECT_EQ(tensor.sizes(), (std::vector<int64_t>{4, 2}));
  expect_equal(tensor.full_tensor(), at::cat({at::ones({3, 2}), at::full({1, 2}, 2.0)}));
  EXPECT_EQ(tensor.to_local().data_ptr(), local.data_ptr());
  expect_equal(tensor.redistribute({Shard{0}}).to_local(),
               rank == 0 ? at::ones({2, 2}) : at::tensor({1.0f, 1.0f, 2.0f, 2.0f}).view({2, 2}));
  EXPECT_FSDP2_ERROR(from_local(at::ones({2, rank + 1}), world_mesh(), {Shard{0}}), kInvalidArgument, "rank 1: [2, 2]");
  EXPECT_FSDP2_ERROR(from_local(at::ones({rank + 1}), world_mesh(), {Shard{0}}, std::vector<int64_t>{6}),
                     kInvalidArgument, "from_local");
}

RANKS_TEST(DTensor, PartialIsReduced, 3) {
  const Tensor local = counting({6, 2}) * (rank + 1.0);
  const Tensor sum = counting({6, 2}) * 6.0;
  const auto tensor = from_local(local, world_mesh(), {Partial{}});
  EXPECT_EQ(tensor.sizes(), sum.sizes());
  EXPECT_TRUE(at::allclose(tensor.full_tensor(), sum));
  for (const auto& target : {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1})}) {
    EXPECT_TRUE(at::allclose(tensor.redistribute({target}).full_tensor(), sum));
  }
  EXPECT_TRUE(at::allclose(from_local(local, world_mesh(), {Partial{ReduceOp::AVG}}).full_tensor(), sum / 3));
  const auto sharded = distribute_tensor(sum, world_mesh(), {Shard{0}});
  EXPECT_FSDP2_ERROR(sharded.redistribute({Partial{}}), kUnsupported, "Partial");
}

RANKS_TEST(DTensor, MeshesOfTwoAxes, 4) {
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {2, 2}, {"dp", "tp"});
  const std::vector<Placement> kinds{Replicate{}, Shard{0}, Shard{1}, StridedShard{0, 2}};
  for (const int64_t rows : {8, 7, 3, 1}) {
    const Tensor full = counting({rows, 5});
    for (const auto& first : kinds) {
      for (const auto& second : {kinds[0], kinds[1], kinds[2]}) {
        const auto tensor = distribute_tensor(full, mesh, {first, second});
        expect_equal(tensor.full_tensor(), full);
        expect_equal(tensor.redistribute({Shard{0}, Shard{0}}).full_tensor(), full);
      }
    }
  }
  // Outer axis strided: the inner axis cuts first.
  const auto strided = distribute_tensor(at::arange(8, at::kFloat), mesh, {StridedShard{0, 2}, Shard{0}});
  const auto at_rank = std::vector<float>{0, 4, 2, 6}[rank];
  expect_equal(strided.to_local(), at::arange(at_rank, at_rank + 2, at::kFloat));
}

}  // namespace
}  // namespace fsdp2
