// labels: ranks
// backends: gloo, shm
// Who casts what where dtypes meet: one child in float16, inputs that come from elsewhere, normalisation layers.

#include "fsdp/parity.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;
using Dtype = std::optional<at::ScalarType>;

/// Notes the dtype of its input; may cast it itself.
struct NotingImpl : torch::nn::Module {
  explicit NotingImpl(bool casts_itself) : casts_itself(casts_itself) {
    layer = register_module("layer", torch::nn::Linear(6, 6));
  }
  Tensor forward(const Tensor& x) {
    seen = x.scalar_type();
    return layer(casts_itself ? x.to(layer->weight.scalar_type()) : x);
  }
  torch::nn::Linear layer{nullptr};
  bool casts_itself;
  at::ScalarType seen{};
};
FSDP2_MODULE(Noting);

struct TwoImpl : torch::nn::Module {
  explicit TwoImpl(bool casts_itself) {
    first = register_module("first", Noting(casts_itself));
    second = register_module("second", Noting(casts_itself));
  }
  Tensor forward(const Tensor& x) {
    seen = x.scalar_type();
    return second(first(x));
  }
  Noting first{nullptr}, second{nullptr};
  at::ScalarType seen{};
};
FSDP2_MODULE(Two);

void run(Two& model) {
  fsdp2::fully_shard(model);
  model(torch::ones({2, 6})).sum().backward();
  for (const auto& named : model->named_parameters()) {
    ASSERT_TRUE(named.value().grad().defined()) << named.key();
    EXPECT_EQ(named.value().grad().scalar_type(), torch::kFloat) << named.key();
  }
  EXPECT_EQ(max_difference(whole(model->second->layer->bias.grad()), torch::full({6}, 2.0)), 0);
}

RANKS_TEST(Casts, OneChildInFloat16, 2) {
  {
    Two model(false);
    fsdp2::fully_shard(model->second, {.mp_policy = {.param_dtype = torch::kHalf}});
    run(model);
    EXPECT_EQ(model->seen, torch::kFloat);
    EXPECT_EQ(model->first->seen, torch::kFloat);
    EXPECT_EQ(model->second->seen, torch::kHalf);
  }
  {  // the module does it
    Two model(true);
    fsdp2::fully_shard(model->second, {.mp_policy = {.param_dtype = torch::kHalf, .cast_forward_inputs = false}});
    run(model);
    EXPECT_EQ(model->seen, torch::kFloat);
    EXPECT_EQ(model->first->seen, torch::kFloat);
    EXPECT_EQ(model->second->seen, torch::kFloat);
  }
  {  // the first one's output is cast back, so the second need not know
    Two model(false);
    fsdp2::fully_shard(model->first, {.mp_policy = {.param_dtype = torch::kHalf, .output_dtype = torch::kFloat}});
    run(model);
    EXPECT_EQ(model->seen, torch::kFloat);
    EXPECT_EQ(model->first->seen, torch::kHalf);
    EXPECT_EQ(model->second->seen, torch::kFloat);
  }
}

struct InnerImpl : torch::nn::Module {
  InnerImpl() { layer = register_module("layer", torch::nn::Linear(6, 6)); }
  Tensor forward(const Tensor& x, const Tensor& y) {
    x_seen = x.scalar_type();
    y_seen = y.scalar_type();
    return layer(x);
  }
  torch::nn::Linear layer{nullptr};
  at::ScalarType x_seen{}, y_seen{};
};
FSDP2_MODULE(Inner);

struct OuterImpl : torch::nn::Module {
  OuterImpl() {
    layer = register_module("layer", torch::nn::Linear(6, 6));
    inner = register_module("inner", Inner());
  }
  Tensor forward(const Tensor& x) {
    seen = x.scalar_type();
    return inner(layer(x), torch::ones({2, 6}));  // the second is from elsewhere, in float32
  }
  torch::nn::Linear layer{nullptr};
  Inner inner{nullptr};
  at::ScalarType seen{};
};
FSDP2_MODULE(Outer);

RANKS_TEST(Casts, InputsFromElsewhereFollowTheModulesOwnPolicy, 2) {
  for (const bool casts : {false, true}) {
    Outer model;
    fsdp2::fully_shard(model->inner, {.mp_policy = {.param_dtype = torch::kHalf, .cast_forward_inputs = casts}});
    fsdp2::fully_shard(model, {.mp_policy = {.param_dtype = torch::kHalf}});
    model(torch::zeros({2, 6})).sum().backward();
    EXPECT_EQ(model->seen, torch::kHalf);
    EXPECT_EQ(model->inner->x_seen, torch::kHalf);
    EXPECT_EQ(model->inner->y_seen, casts ? torch::kHalf : torch::kFloat);
  }
}

// ----- normalisation layers ----------------------------------------------------------------------------------------

template <class First, class Norm, class Last>
struct ThreeImpl : torch::nn::Module {
  ThreeImpl(const First& a, const Norm& b, const Last& c) : first(a), norm(b), last(c) {
    register_module("first", first);
    register_module("norm", norm);
    register_module("last", last);
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = norm(first(x));
    return last(norm_out ? h.to(*norm_out) : h);
  }
  First first;
  Norm norm;
  Last last;
  Dtype norm_out = {};  // of the unsharded one, where a policy casts for the sharded one
};

enum class Buffers { kUntouched, kCastByUser, kCastByPolicy };
struct Arrangement {
  Buffers buffers = Buffers::kUntouched;
  bool own_policy = false;  // the norm computes in float32, only its output is cast
};

void convert(const std::vector<Tensor>& tensors, at::ScalarType dtype) {
  for (Tensor tensor : tensors) {
    if (tensor.is_floating_point()) tensor.set_data(tensor.detach().to(dtype));
  }
}

template <class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// All ranks have the same input, so the unsharded module in the same dtypes gives the same output, gradients and
/// running statistics, or fails as it does.
template <class Make>
void expect_like_plain(Make&& make, const Tensor& x, at::ScalarType dtype, const Arrangement& how,
                       const std::string& name) {
  const std::string where =
      c10::str(name, " ", dtype, " buffers ", static_cast<int>(how.buffers), " own ", how.own_policy);
  torch::manual_seed(42);
  auto plain = make(), model = make();
  copy_state(*model, *plain);
  for (const Tensor& param : plain->parameters()) ASSERT_EQ(param.scalar_type(), torch::kFloat);
  convert(plain->first->parameters(), dtype);
  convert(plain->last->parameters(), dtype);
  if (!how.own_policy) convert(plain->norm->parameters(), dtype);
  if (how.buffers != Buffers::kUntouched) convert(plain->norm->buffers(), dtype);
  if (how.own_policy) plain->norm_out = dtype;

  const fsdp2::MixedPrecisionPolicy policy{.param_dtype = dtype};
  fsdp2::MixedPrecisionPolicy of_norm = policy;
  if (how.own_policy) of_norm = {.output_dtype = dtype};
  if (how.buffers == Buffers::kCastByPolicy) of_norm.buffer_dtype = dtype;
  fsdp2::fully_shard(model->first, {.mp_policy = policy});
  fsdp2::fully_shard(model->norm, {.mp_policy = of_norm});
  fsdp2::fully_shard(model->last, {.mp_policy = policy});
  fsdp2::fully_shard(model, {.mp_policy = policy});
  if (how.buffers == Buffers::kCastByUser) convert(model->norm->buffers(), dtype);

  Tensor expected, out;
  const std::string fails = error_of([&] {
    expected = plain->forward(x.to(dtype));
    expected.sum().backward();
  });
  const std::string also = error_of([&] {
    out = fsdp2::call(model, x);
    out.sum().backward();
  });
  ASSERT_EQ(also.empty(), fails.empty()) << where << " " << fails << " " << also;
  if (!fails.empty()) return;
  EXPECT_EQ(out.scalar_type(), dtype) << where;
  // Halved before they are summed: the smallest float16 values lose a bit.
  const double tolerance = dtype == torch::kHalf ? 1.2e-7 : 0;
  EXPECT_EQ(max_difference(out.detach(), expected.detach()), 0) << where;
  for (const auto& named : model->named_parameters()) {
    const Tensor &grad = named.value().grad(), &theirs = plain->named_parameters()[named.key()].grad();
    ASSERT_TRUE(grad.defined()) << named.key() << " " << where;
    EXPECT_EQ(grad.scalar_type(), torch::kFloat) << named.key() << " " << where;
    EXPECT_LE(max_difference(whole(grad), theirs), tolerance) << named.key() << " " << where;
  }
  const bool cast_by_user = how.buffers == Buffers::kCastByUser;
  for (const auto& named : model->norm->named_buffers()) {
    if (!named.value().is_floating_point()) continue;
    EXPECT_EQ(named.value().scalar_type(), cast_by_user ? dtype : torch::kFloat) << named.key() << " " << where;
    EXPECT_LE(max_difference(named.value(), plain->norm->named_buffers()[named.key()]), 1e-2)
        << named.key() << " " << where;
  }
}

using HookedConv = fsdp2::Hooked<torch::nn::Conv2d>;
HookedConv conv(int64_t in, int64_t out) { return HookedConv(torch::nn::Conv2dOptions(in, out, 3)); }

void expect_norms_work(at::ScalarType dtype, const std::vector<Arrangement>& arrangements) {
  using LayerNorm = fsdp2::Hooked<torch::nn::LayerNorm>;
  using BatchNorm1d = fsdp2::Hooked<torch::nn::BatchNorm1d>;
  using BatchNorm2d = fsdp2::Hooked<torch::nn::BatchNorm2d>;
  torch::manual_seed(1);
  const Tensor rows = torch::randn({4, 8}), images = torch::randn({3, 1, 9, 9});
  const auto with_layer_norm = [] {
    return std::make_shared<ThreeImpl<Linear, LayerNorm, Linear>>(
        linear(8, 8, true), LayerNorm(torch::nn::LayerNormOptions({8})), linear(8, 8, true));
  };
  const auto with_batch_norm = [] {
    return std::make_shared<ThreeImpl<Linear, BatchNorm1d, Linear>>(linear(8, 8, true), BatchNorm1d(8),
                                                                    linear(8, 8, true));
  };
  const auto with_images = [] {
    return std::make_shared<ThreeImpl<HookedConv, BatchNorm2d, HookedConv>>(conv(1, 5), BatchNorm2d(5), conv(5, 4));
  };
  expect_like_plain(with_layer_norm, rows, dtype, {}, "layer norm");
  for (const Arrangement& how : arrangements) {
    expect_like_plain(with_batch_norm, rows, dtype, how, "batch norm 1d");
    expect_like_plain(with_images, images, dtype, how, "batch norm 2d");
  }
}

const std::vector<Arrangement> kByUser{
    {Buffers::kUntouched, false}, {Buffers::kCastByUser, false}, {Buffers::kUntouched, true}};

RANKS_TEST(Casts, NormalisationLayersInBfloat16, 2) { expect_norms_work(torch::kBFloat16, kByUser); }
RANKS_TEST(Casts, NormalisationLayersInFloat16, 2) { expect_norms_work(torch::kHalf, kByUser); }

RANKS_TEST(Casts, NormalisationLayersWhoseBuffersThePolicyCasts, 2) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) expect_norms_work(dtype, {{Buffers::kCastByPolicy, false}});
}

}  // namespace
