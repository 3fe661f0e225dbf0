// labels: ranks
// backends: gloo, shm
// timeout: 600
// The arithmetic of gradient reduction: divided exactly once whatever the dtype, mesh, factor and collectives; and the
// settings that must not change it.

#include "fsdp/parity.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

struct Arithmetic {
  at::ScalarType dtype = torch::kFloat;
  std::optional<double> factor = {};
  bool force_sum = false;
};

/// The gradient of rank r is r + 1 everywhere, so every correct result below is exact in every dtype.
void expect_divided_once(int rank, const std::vector<int64_t>& mesh_shape, const Arithmetic& how, bool by_policy) {
  const int64_t ranks = fsdp2::get_world_size();
  const double sum = ranks * (ranks + 1) / 2.0, expected = sum / how.factor.value_or(ranks);
  const std::string where =
      c10::str("mesh ", at::IntArrayRef(mesh_shape), " ", how.dtype, by_policy ? " by policy" : "", " factor ",
               how.factor.value_or(0), " force sum ", how.force_sum);
  Linear layer = linear(4, 3);  // 3 rows: uneven, and padded
  if (!by_policy) layer->to(how.dtype);
  fsdp2::FullyShardOptions options;
  options.mesh = mesh_shape.size() == 1 ? fsdp2::init_device_mesh(torch::kCPU, mesh_shape)
                                        : fsdp2::init_device_mesh(torch::kCPU, mesh_shape, {"replicate", "shard"});
  if (by_policy) options.mp_policy.reduce_dtype = how.dtype;
  auto handle = fsdp2::fully_shard(layer, options);
  if (how.factor) handle.set_gradient_divide_factor(*how.factor);
  if (how.force_sum) handle.set_force_sum_reduction_for_comms(true);
  const at::ScalarType own = layer->weight.scalar_type();
  layer(torch::full({1, 4}, rank + 1.0, own)).sum().backward();
  EXPECT_EQ(layer->weight.grad().scalar_type(), own) << where;
  EXPECT_EQ(max_difference(whole(layer->weight.grad()), torch::full({3, 4}, expected)), 0) << where;
}

void expect_every_arithmetic(int rank) {
  const int64_t ranks = fsdp2::get_world_size();
  std::vector<std::vector<int64_t>> meshes{{ranks}, {ranks, 1}, {1, ranks}};
  if (ranks == 4) meshes.push_back({2, 2});
  for (const auto& mesh : meshes) {
    for (const at::ScalarType dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble}) {
      for (const bool force_sum : {false, true}) {
        for (const std::optional<double>& factor :
             std::vector<std::optional<double>>{std::nullopt, 8., 0.5, static_cast<double>(ranks)}) {
          expect_divided_once(rank, mesh, {dtype, factor, force_sum}, false);
          if (dtype != torch::kFloat) expect_divided_once(rank, mesh, {dtype, factor, force_sum}, true);
        }
      }
    }
  }
}
RANKS_TEST(Reduction, DividesOnceOnOneRank, 1) { expect_every_arithmetic(rank); }
RANKS_TEST(Reduction, DividesOnceOnTwoRanks, 2) { expect_every_arithmetic(rank); }
RANKS_TEST(Reduction, DividesOnceOnThreeRanks, 3) { expect_every_arithmetic(rank); }
RANKS_TEST(Reduction, DividesOnceOnFourRanks, 4) { expect_every_arithmetic(rank); }

RANKS_TEST(Reduction, OneRankDividesByTheFactorAlone, 1) {
  for (const double factor : {0., 1., 2.}) {
    Linear layer = linear(8, 4);
    auto handle = fsdp2::fully_shard(layer, {.mesh = fsdp2::init_device_mesh(torch::kCPU, {1})});
    if (factor != 0) handle.set_gradient_divide_factor(factor);
    layer(torch::ones({3, 8})).sum().backward();
    EXPECT_EQ(max_difference(whole(layer->weight.grad()), torch::full({4, 8}, factor == 2 ? 1.5 : 3.)), 0) << factor;
  }
}

// ----- many shapes -----

/// Gradients are the coefficients that it is called with.
struct WeightedImpl : torch::nn::Module {
  WeightedImpl(const std::vector<std::vector<int64_t>>& sizes, const std::vector<at::ScalarType>& dtypes) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      weights.push_back(
          register_parameter("w" + std::to_string(i), torch::randn(sizes[i]).to(dtypes[i % dtypes.size()])));
    }
  }
  Tensor forward(const std::vector<Tensor>& coefficients) {
    Tensor sum = torch::zeros({1});
    for (size_t i = 0; i < weights.size(); ++i) sum = sum + (weights[i] * coefficients[i]).sum();
    return sum;
  }
  std::vector<Tensor> weights;
};
FSDP2_MODULE(Weighted);

const std::vector<std::vector<int64_t>> kSizes{{17, 25}, {17}, {8, 31}, {3}, {8, 8}, {1, 9}, {32, 2, 2}, {5, 3}};

/// `make(i, r)` is the gradient of parameter i on rank r.
template <class Make>
void expect_reduced(int rank, Weighted& model, Make&& make, double tolerance, const std::string& where) {
  const int size = fsdp2::get_world_size();
  std::vector<Tensor> mine, expected;
  for (size_t i = 0; i < model->weights.size(); ++i) {
    Tensor sum = torch::zeros(model->weights[i].sizes(), torch::kDouble);
    for (int r = 0; r < size; ++r) {
      const Tensor each = make(i, r);
      if (r == rank) mine.push_back(each);
      sum += each.to(torch::kDouble);
    }
    expected.push_back(sum / size);
  }
  model(mine).backward();
  for (size_t i = 0; i < expected.size(); ++i) {
    const Tensor& grad = model->weights[i].grad();
    EXPECT_EQ(grad.scalar_type(), model->weights[i].scalar_type()) << where << " " << i;
    EXPECT_LE(max_difference(whole(grad), expected[i]), tolerance) << where << " " << i;
  }
}

void expect_shapes_reduced(int rank) {
  torch::manual_seed(42);
  Weighted model(kSizes, std::vector<at::ScalarType>{torch::kFloat});
  fsdp2::fully_shard(model);
  expect_reduced(
      rank, model, [](size_t i, int) { return torch::randn(kSizes[i]); }, 1e-6, "float32");
  Weighted narrow(kSizes, std::vector<at::ScalarType>{torch::kFloat});
  fsdp2::fully_shard(narrow, {.mp_policy = {.reduce_dtype = torch::kHalf}});
  fsdp2::reset_counters();
  const auto whole_numbers = [](size_t i, int r) { return torch::full(kSizes[i], 12.0f * r); };  // exact in float16
  expect_reduced(rank, narrow, whole_numbers, 0, "float16");
  EXPECT_EQ(fsdp2::counters().reduce_scatters, 1);
}
RANKS_TEST(Reduction, EveryShapeIsAveragedOnThreeRanks, 3) { expect_shapes_reduced(rank); }
RANKS_TEST(Reduction, EveryShapeIsAveragedOnFourRanks, 4) { expect_shapes_reduced(rank); }

// Gradients of two dtypes are cast while they are copied into one buffer.
RANKS_TEST(Reduction, GradientsOfTwoDtypesShareOneReductionDtype, 2) {
  torch::manual_seed(42);
  const std::vector<std::vector<int64_t>> sizes{{5, 3}, {7}, {33, 2, 2}};
  Weighted model(sizes, std::vector<at::ScalarType>{torch::kBFloat16, torch::kFloat});
  fsdp2::fully_shard(model, {.mp_policy = {.reduce_dtype = torch::kFloat}});
  fsdp2::reset_counters();
  const auto make = [&](size_t i, int) {
    return torch::randint(-64, 64, sizes[i]).to(i == 1 ? torch::kFloat : torch::kBFloat16);
  };
  expect_reduced(rank, model, make, 0, "two dtypes");
  EXPECT_EQ(fsdp2::counters().reduce_scatters, 1);
  EXPECT_EQ(fsdp2::counters().all_gathers, 2);
}

// ----- the factor belongs to one module -----

RANKS_TEST(Reduction, TheFactorIsOfOneModuleOnly, 4) {
  for (const double factor : {8., 4., 3.}) {
    for (const auto& shape : std::vector<std::vector<int64_t>>{{4}, {2, 2}, {4, 1}}) {
      const std::string where = c10::str("factor ", factor, " mesh ", at::IntArrayRef(shape));
      torch::manual_seed(42);
      auto [reference, model] = make_twins<Tower>(5, 2);
      fsdp2::FullyShardOptions options{.reshard_after_forward = false};
      options.mesh = shape.size() == 1 ? fsdp2::init_device_mesh(torch::kCPU, shape)
                                       : fsdp2::init_device_mesh(torch::kCPU, shape, {"outer", "inner"});
      for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp, options);
      fsdp2::fully_shard(model, options).set_gradient_divide_factor(factor);
      torch::optim::AdamW optimizer(model->parameters(), 1e-2), expected_optimizer(reference->parameters(), 1e-2);
      for (int step = 0; step < 2; ++step) {
        const Tensor all = torch::randn({8, 5}, torch::kDouble);
        model(rows_of(all, rank)).sum().backward();
        reference(all).sum().backward();
        for (Tensor& param : reference->parameters()) param.mutable_grad().div_(4);
        for (Tensor& param : reference->first->parameters()) param.mutable_grad().mul_(4 / factor);
        expect_same_gradients(*model, *reference, where);
        for (auto* each : {&optimizer, &expected_optimizer}) {
          each->step();
          each->zero_grad();
        }
        expect_same_values(*model, *reference, where);
      }
    }
  }
}

RANKS_TEST(Reduction, FactorsThatCannotDivideAreRefused, 2) {
  Linear layer = linear(2, 2);
  auto handle = fsdp2::fully_shard(layer);
  for (const double factor : {0., -2., std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_FSDP2_ERROR(handle.set_gradient_divide_factor(factor), kInvalidArgument, "factor");
  }
  for (const int buffers : {0, -1}) {
    EXPECT_FSDP2_ERROR(handle.set_reduce_scatter_max_input_buffers(buffers), kInvalidArgument, std::to_string(buffers));
  }
  handle.set_reduce_scatter_max_input_buffers(2);
  layer(torch::full({1, 2}, rank + 1.0f)).sum().backward();
  EXPECT_EQ(max_difference(whole(layer->weight.grad()), torch::full({2, 2}, 1.5)), 0);
}

// ----- parameters without a gradient -----

struct ChoiceImpl : torch::nn::Module {
  ChoiceImpl() {
    a = register_module("a", torch::nn::Linear(torch::nn::LinearOptions(2, 2).bias(false)));
    b = register_module("b", torch::nn::Linear(torch::nn::LinearOptions(2, 2).bias(false)));
    frozen = register_parameter("frozen", torch::ones({2}), /*requires_grad=*/false);
  }
  Tensor forward(const Tensor& x, bool first) { return (first ? a : b)(x)*frozen; }
  torch::nn::Linear a{nullptr}, b{nullptr};
  Tensor frozen;
};
FSDP2_MODULE(Choice);

RANKS_TEST(Reduction, ParametersWithoutAGradientMayTakePartWithZeros, 2) {
  struct RootImpl : torch::nn::Module {
    RootImpl() { choice = register_module("choice", Choice()); }
    Tensor forward(const Tensor& x, bool first) { return choice(x, first); }
    Choice choice{nullptr};
  };
  auto model = std::make_shared<RootImpl>();
  fsdp2::fully_shard(model->choice);
  auto root = fsdp2::fully_shard(model);
  const auto grad_of = [&](torch::nn::Linear& layer) { return whole(layer->weight.grad()); };
  const auto run = [&](bool first) {
    fsdp2::reset_counters();
    fsdp2::call(model, torch::ones({1, 2}), first).sum().backward();
    EXPECT_FALSE(model->choice->frozen.grad().defined());
  };
  root.set_reduce_scatter_unused_params(true);
  run(rank == 0);  // each rank uses another one
  EXPECT_EQ(fsdp2::counters().reduce_scatters, 1);
  EXPECT_EQ(max_difference(grad_of(model->choice->a), torch::full({2, 2}, 0.5)), 0);
  EXPECT_EQ(max_difference(grad_of(model->choice->b), torch::full({2, 2}, 0.5)), 0);
  run(true);  // adds zeros to what is there
  EXPECT_EQ(max_difference(grad_of(model->choice->a), torch::full({2, 2}, 1.5)), 0);
  EXPECT_EQ(max_difference(grad_of(model->choice->b), torch::full({2, 2}, 0.5)), 0);
  model->zero_grad();
  run(true);  // a zero gradient, not none
  ASSERT_TRUE(model->choice->b->weight.grad().defined());
  EXPECT_EQ(max_difference(grad_of(model->choice->b), torch::zeros({2, 2})), 0);

  model->zero_grad();
  root.set_reduce_scatter_unused_params(false, /*recurse=*/false);
  run(true);
  EXPECT_TRUE(model->choice->b->weight.grad().defined());  // that was the root's own
  model->zero_grad();
  root.set_reduce_scatter_unused_params(false);
  run(true);
  EXPECT_FALSE(model->choice->b->weight.grad().defined());
  EXPECT_EQ(max_difference(grad_of(model->choice->a), torch::ones({2, 2})), 0);
}

// ----- settings that change nothing -----

/// Two steps in bfloat16 with and without the setting end in the same bits.
template <class Set>
void expect_same_bits(int rank, const fsdp2::FullyShardOptions& options, const std::string& where, Set&& set) {
  torch::manual_seed(42);
  Tower models[2] = {Tower(4, 3), Tower(4, 3)};
  copy_state(*models[1], *models[0]);
  std::vector<std::unique_ptr<torch::optim::AdamW>> optimizers;
  for (Tower& model : models) {
    for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp, options);
    fsdp2::fully_shard(model, options);
    optimizers.push_back(std::make_unique<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-2)));
  }
  set(models[1]);
  for (int step = 0; step < 2; ++step) {
    const Tensor x = rows_of(torch::randn({2 * fsdp2::get_world_size(), 4}), rank);
    Tensor losses[2];
    for (int i = 0; i < 2; ++i) {
      losses[i] = models[i](x).sum();
      losses[i].backward();
    }
    EXPECT_EQ(max_difference(losses[0].detach(), losses[1].detach()), 0) << where;
    for (const auto& named : models[0]->named_parameters()) {
      const Tensor& other = models[1]->named_parameters()[named.key()];
      EXPECT_EQ(max_difference(whole(named.value().grad()), whole(other.grad())), 0) << named.key() << " " << where;
    }
    for (int i = 0; i < 2; ++i) {
      optimizers[i]->step();
      optimizers[i]->zero_grad();
    }
    for (const auto& named : models[0]->named_parameters()) {
      const Tensor& other = models[1]->named_parameters()[named.key()];
      EXPECT_EQ(max_difference(whole(named.value()), whole(other)), 0) << named.key() << " " << where;
    }
  }
}

RANKS_TEST(Reduction, NumberOfInputBuffersAndASeparateGroupChangeNoBit, 4) {
  for (const bool two_axes : {false, true}) {
    for (const bool reshard : {true, false}) {
      fsdp2::FullyShardOptions options{
          .reshard_after_forward = reshard,
          .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kBFloat16}};
      options.mesh = two_axes ? fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"outer", "inner"})
                              : fsdp2::init_device_mesh(torch::kCPU, {4});
      const std::string where = c10::str("axes ", two_axes ? 2 : 1, " reshard ", reshard);
      expect_same_bits(rank, options, where + " two buffers",
                       [&](Tower& model) { fsdp2::fsdp_module(model).set_reduce_scatter_max_input_buffers(2); });
      expect_same_bits(rank, options, where + " one module allows more", [&](Tower& model) {
        fsdp2::fsdp_module(model->mlps[0]).set_reduce_scatter_max_input_buffers(3, /*recurse=*/false);
      });
      expect_same_bits(rank, options, where + " separate group", [&](Tower& model) {
        fsdp2::fsdp_module(model).set_separate_reduce_scatter_group();
        fsdp2::fsdp_module(model).set_separate_reduce_scatter_group(true);  // once more changes nothing
      });
      expect_same_bits(rank, options, where + " separate group and back", [&](Tower& model) {
        fsdp2::fsdp_module(model).set_separate_reduce_scatter_group(true);
        fsdp2::fsdp_module(model).set_separate_reduce_scatter_group(false);
      });
    }
  }
}

}  // namespace
