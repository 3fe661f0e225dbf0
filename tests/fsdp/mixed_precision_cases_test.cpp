// labels: ranks
// backends: gloo, shm
// MixedPrecisionPolicy in training: what is computed and reduced in which dtype, against the same arithmetic by hand;
// who casts inputs and outputs of which module; normalisation layers.

#include "fsdp/parity.h"

namespace data {

struct Pair {
  torch::Tensor x, y;
};
FSDP2_FIELDS(Pair, x, y);
struct Outer {
  Pair inner;
  torch::Tensor z;
};
FSDP2_FIELDS(Outer, inner, z);

}  // namespace data

namespace {

using namespace fsdp2::testing;
using torch::Tensor;
using Dtype = std::optional<at::ScalarType>;

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t dim) {
    for (int i = 0; i < 3; ++i) mlps.push_back(register_module("mlp" + std::to_string(i), Mlp(dim)));
  }
  Tensor forward(Tensor x) {
    for (Mlp& mlp : mlps) x = mlp(x);
    return x;
  }
  std::vector<Mlp> mlps;
};
FSDP2_MODULE(Stack);

constexpr int64_t kDim = 8;

struct Setting {
  Dtype param = {}, reduce = {};
  fsdp2::ReshardAfterForward reshard = true;
  bool largest_dim = false;
};

/// Cast, summed and divided in the dtype of the reduction. float16 has little range, so it is divided in part before.
Tensor reduce_by_hand(const std::vector<Tensor>& gradients, at::ScalarType dtype) {
  const double ranks = static_cast<double>(gradients.size()), before = dtype == torch::kHalf ? 2 : 1;
  Tensor sum = gradients[0].to(dtype) / before;
  for (size_t i = 1; i < gradients.size(); ++i) sum = sum + gradients[i].to(dtype) / before;
  return (sum / (ranks / before)).to(torch::kFloat);
}

/// Adam in float32 on weights that are computed with in another dtype, whole, each rank's rows in turn.
struct ByHand {
  ByHand(const Stack& start, at::ScalarType compute) : master(kDim), copy(kDim), optimizer(master->parameters(), 1e-2) {
    copy_state(*master, *start);
    copy->to(compute);
    copy_state(*copy, *master);
  }
  /// Returns what each rank computes.
  std::vector<Tensor> step(const Tensor& all, at::ScalarType reduce) {
    std::vector<Tensor> outs;
    std::map<std::string, std::vector<Tensor>> gradients;
    for (int r = 0; r < fsdp2::get_world_size(); ++r) {
      outs.push_back(copy(rows_of(all, r)));
      outs.back().sum().backward();
      for (const auto& named : copy->named_parameters()) gradients[named.key()].push_back(named.value().grad().clone());
      copy->zero_grad();
    }
    for (auto& named : master->named_parameters()) {
      named.value().mutable_grad() = reduce_by_hand(gradients[named.key()], reduce);
    }
    return outs;
  }
  void update() {
    optimizer.step();
    copy_state(*copy, *master);
  }
  Stack master, copy;
  torch::optim::Adam optimizer;
};

fsdp2::FullyShardOptions options_of(const Setting& s) {
  fsdp2::FullyShardOptions options{.reshard_after_forward = s.reshard,
                                   .mp_policy = {.param_dtype = s.param, .reduce_dtype = s.reduce}};
  if (s.largest_dim) {
    options.shard_placement_fn = [](const std::string&, const Tensor& param) -> std::optional<fsdp2::ShardPlacement> {
      const auto sizes = param.sizes();
      const int64_t dim = std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
      return fsdp2::ShardPlacement{.placement = fsdp2::Shard{dim}};
    };
  }
  return options;
}

void expect_like_by_hand(int rank, const Setting& s) {
  const at::ScalarType compute = s.param.value_or(torch::kFloat), reduce = s.reduce.value_or(compute);
  const std::string where = c10::str(compute, " reduced in ", reduce, " raf index ", s.reshard->index(), s.largest_dim);
  torch::manual_seed(42);
  Stack model(kDim);
  ByHand expected(model, compute);
  const auto options = options_of(s);
  for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp, options);
  fsdp2::fully_shard(model, options);
  torch::optim::Adam optimizer(model->parameters(), 1e-2);
  const int64_t numel = fsdp2::num_parameters(model);  // every size is divided by the number of ranks: no padding
  // With more ranks the order of additions decides the last bit. float16 is divided by two before it is added, which
  // rounds the smallest numbers, where the sum is not formed in float.
  const bool exact = fsdp2::get_world_size() == 2 &&
                     (reduce != torch::kHalf || fsdp2::default_group()->getBackendName() != "custom");
  const double epsilon = reduce == torch::kFloat ? 1e-6 : reduce == torch::kHalf ? 2e-3 : 1e-2;
  const Tensor all = torch::randn({4 * fsdp2::get_world_size(), kDim}).to(compute);
  for (int step = 0; step < 3; ++step) {
    const auto outs = expected.step(all, reduce);
    const Tensor out = model(rows_of(all, rank));
    EXPECT_EQ(out.scalar_type(), compute) << where;
    const double drift = step == 0 ? 0 : compute == torch::kFloat ? 1e-4 : 5e-2;
    EXPECT_LE(max_difference(out.detach(), outs[rank].detach()), drift) << where << " step " << step;
    const int64_t before = fsdp2::counters().bytes, gathers = fsdp2::counters().all_gathers;
    out.sum().backward();
    const int64_t again = (fsdp2::counters().all_gathers - gathers) * numel / 3 * at::elementSize(compute);
    EXPECT_EQ(fsdp2::counters().bytes - before - again, numel * static_cast<int64_t>(at::elementSize(reduce))) << where;
    if (step == 0) {  // from equal weights
      for (const auto& named : model->named_parameters()) {
        const Tensor grad = whole(named.value().grad()),
                     theirs = expected.master->named_parameters()[named.key()].grad();
        EXPECT_EQ(grad.scalar_type(), torch::kFloat) << named.key() << " " << where;
        const double scale = std::max(1.0, theirs.abs().max().item<double>());
        EXPECT_LE(max_difference(grad, theirs), exact ? 0 : epsilon * scale)
            << named.key() << " " << where;
      }
    }
    optimizer.step();
    optimizer.zero_grad(step % 2 == 0);
    expected.update();
  }
}

void expect_all_like_by_hand(int rank) {
  const int size = fsdp2::get_world_size();
  for (const auto& reshard : std::vector<fsdp2::ReshardAfterForward>{false, true, 2}) {
    for (const bool largest_dim : {false, true}) {
      if (largest_dim && size > 2) continue;
      expect_like_by_hand(rank, {torch::kBFloat16, {}, reshard, largest_dim});
      expect_like_by_hand(rank, {torch::kHalf, {}, reshard, largest_dim});
      expect_like_by_hand(rank, {torch::kBFloat16, torch::kFloat, reshard, largest_dim});
      expect_like_by_hand(rank, {{}, torch::kBFloat16, reshard, largest_dim});
    }
  }
}
RANKS_TEST(MixedPrecision, ComputesAndReducesLikeByHandOnTwo, 2) { expect_all_like_by_hand(rank); }
RANKS_TEST(MixedPrecision, ComputesAndReducesLikeByHandOnFour, 4) { expect_all_like_by_hand(rank); }

// Which dtypes a group has is decided when they are needed, not when everything happened to be frozen.
RANKS_TEST(MixedPrecision, UnfrozenAfterAFirstForwardReducesInTheReductionDtype, 2) {
  struct FrozenFirstImpl : torch::nn::Module {
    FrozenFirstImpl() {
      first = register_module("first", torch::nn::Linear(4, 4));
      second = register_module("second", torch::nn::Linear(4, 4));
      numbers = register_parameter("numbers", torch::ones({5}, torch::kLong), /*requires_grad=*/false);
    }
    Tensor forward(const Tensor& x) {
      EXPECT_EQ(numbers.scalar_type(), torch::kLong);
      EXPECT_EQ(numbers.sum().item<int64_t>(), 5);
      EXPECT_EQ(first->weight.scalar_type(), torch::kBFloat16);
      return second(first(x));
    }
    torch::nn::Linear first{nullptr}, second{nullptr};
    Tensor numbers;
  };
  auto model = std::make_shared<FrozenFirstImpl>();
  fsdp2::fully_shard(model, {.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
  for (Tensor& param : model->parameters()) param.set_requires_grad(false);
  const Tensor x = torch::ones({2, 4});
  {
    torch::NoGradGuard no_grad;
    fsdp2::call(model, x);
  }
  for (auto* each : {&model->first, &model->second}) {
    for (Tensor& param : (*each)->parameters()) param.set_requires_grad(true);
  }
  fsdp2::reset_counters();
  fsdp2::call(model, x).sum().backward();
  EXPECT_EQ(fsdp2::counters().reduce_scatters, 1);
  EXPECT_EQ(fsdp2::counters().bytes, 2 * (16 + 4) * 4);  // the root is whole still: the reduction alone
  for (auto* each : {&model->first, &model->second}) {
    for (const Tensor& param : (*each)->parameters()) EXPECT_EQ(param.grad().scalar_type(), torch::kFloat);
  }
  EXPECT_EQ(max_difference(whole(model->second->bias.grad()), torch::full({4}, 2.0)), 0);
}

// The policy names one dtype twice; parameters that become float32 later are reduced in it all the same.
RANKS_TEST(MixedPrecision, AConvertedModelKeepsTheDtypeOfItsPolicy, 2) {
  torch::manual_seed(42);
  Mlp model(kDim);
  model->to(torch::kBFloat16);
  const fsdp2::MixedPrecisionPolicy policy{.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kBFloat16};
  EXPECT_EQ(policy.reduce_dtype, torch::kBFloat16);
  fsdp2::fully_shard(model->in_proj, {.mp_policy = policy});
  fsdp2::fully_shard(model->out_proj, {.mp_policy = policy});
  fsdp2::fully_shard(model, {.mp_policy = policy});
  model->to(torch::kFloat);
  const Tensor out = model(torch::randn({4, kDim}));
  EXPECT_EQ(out.scalar_type(), torch::kBFloat16);
  const int64_t gathered = fsdp2::counters().bytes;
  out.sum().backward();
  const int64_t numel = fsdp2::num_parameters(model);
  EXPECT_EQ(fsdp2::counters().bytes - gathered, numel * 2 + numel * 2);  // gathered again, and reduced
  for (const Tensor& param : model->parameters()) EXPECT_EQ(param.grad().scalar_type(), torch::kFloat);
}

// ----- structures between modules -----

Tensor sum_of(const data::Pair& all) { return all.x + all.y; }
Tensor sum_of(const data::Outer& all) { return sum_of(all.inner) + all.z; }
Tensor sum_of(const std::tuple<Tensor, Tensor>& all) { return std::get<0>(all) + std::get<1>(all); }
template <class T>
T spread(const Tensor& x);
template <>
data::Pair spread(const Tensor& x) {
  return {x, x.clone()};
}
template <>
data::Outer spread(const Tensor& x) {
  return {{x, x.clone()}, x.clone()};
}
template <>
std::tuple<Tensor, Tensor> spread(const Tensor& x) {
  return {x, x.clone()};
}

template <class T>
struct SpreadImpl : torch::nn::Module {
  T forward(const Tensor& x) { return spread<T>(x); }
};
template <class T>
struct CollectImpl : torch::nn::Module {
  Tensor forward(const T& all) { return sum_of(all); }
};
template <class T>
struct EachImpl : torch::nn::Module {
  EachImpl() { layer = register_module("layer", torch::nn::Linear(kDim, kDim)); }
  data::Pair apply(const data::Pair& all) { return {layer(all.x), layer(all.y)}; }
  data::Outer apply(const data::Outer& all) { return {apply(all.inner), layer(all.z)}; }
  std::tuple<Tensor, Tensor> apply(const std::tuple<Tensor, Tensor>& all) {
    return {layer(std::get<0>(all)), layer(std::get<1>(all))};
  }
  T forward(const T& all) { return apply(all); }
  torch::nn::Linear layer{nullptr};
};
template <class T>
struct StructuredImpl : torch::nn::Module {
  StructuredImpl() {
    register_module("in", in);
    register_module("first", first);
    register_module("second", second);
    register_module("out", out);
  }
  Tensor forward(const Tensor& x) {
    return fsdp2::call(out, fsdp2::call(second, fsdp2::call(first, fsdp2::call(in, x))));
  }
  std::shared_ptr<SpreadImpl<T>> in = std::make_shared<SpreadImpl<T>>();
  std::shared_ptr<EachImpl<T>> first = std::make_shared<EachImpl<T>>(), second = std::make_shared<EachImpl<T>>();
  std::shared_ptr<CollectImpl<T>> out = std::make_shared<CollectImpl<T>>();
};

template <class T>
void expect_structures_train(int rank) {
  for (const auto& [param, reduce] : std::vector<std::pair<Dtype, Dtype>>{
           {{}, {}}, {torch::kBFloat16, torch::kBFloat16}, {torch::kBFloat16, torch::kFloat}}) {
    torch::manual_seed(42);
    auto model = std::make_shared<StructuredImpl<T>>(), reference = std::make_shared<StructuredImpl<T>>();
    copy_state(*model, *reference);
    const fsdp2::FullyShardOptions options{.mp_policy = {.param_dtype = param, .reduce_dtype = reduce}};
    fsdp2::fully_shard(model->in, options);
    fsdp2::fully_shard(model->first, options);
    fsdp2::fully_shard(model->second, options);
    fsdp2::fully_shard(model->out, options);
    fsdp2::fully_shard(model, options);
    torch::optim::SGD optimizer(model->parameters(), 1e-2), expected_optimizer(reference->parameters(), 1e-2);
    for (int step = 0; step < 3; ++step) {
      const Tensor all = torch::rand({4, kDim});
      const Tensor out = fsdp2::call(model, rows_of(all, rank)), expected = reference->forward(all);
      EXPECT_EQ(out.scalar_type(), param.value_or(torch::kFloat));
      const double tolerance = param ? 3e-2 : 1e-5;
      const double scale = std::max(1.0, expected.abs().max().item<double>());
      EXPECT_LE(max_difference(out.detach(), rows_of(expected.detach(), rank)), tolerance * scale) << step;
      out.sum().backward();
      (expected.sum() / 2).backward();
      double largest = 1;
      for (const Tensor& each : reference->parameters())
        largest = std::max(largest, each.grad().abs().max().item<double>());
      expect_same_gradients(*model, *reference, c10::str("step ", step), tolerance * largest);
      for (auto* each : {&optimizer, &expected_optimizer}) {
        each->step();
        each->zero_grad(step % 2 == 0);
      }
    }
  }
}

RANKS_TEST(MixedPrecision, StructuresBetweenModulesTrain, 2) {
  expect_structures_train<data::Pair>(rank);
  expect_structures_train<data::Outer>(rank);
  expect_structures_train<std::tuple<Tensor, Tensor>>(rank);
}

}  // namespace
