// labels: ranks
// Faults that users of FSDP2 reported about what may stand in one group: row 12 (pytorch#156784) parameters of
// several dtypes, row 14 (pytorch#176076) a tensor with two users.

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/dcp/state_dict.h>

#include <algorithm>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

// ---- Row 12

struct TwoDtypesImpl : torch::nn::Module {
  TwoDtypesImpl() {
    first = register_module("first", torch::nn::Linear(6, 5));
    middle = register_module("middle", torch::nn::Linear(5, 7));
    last = register_module("last", torch::nn::Linear(7, 3));
    middle->to(torch::kBFloat16);
    torch::NoGradGuard no_grad;
    for (Tensor& param : parameters()) param.random_(-1, 2);  // whole numbers: bfloat16 is exact
  }
  Tensor forward(const Tensor& x) {
    const auto dtype = first->weight.scalar_type();
    return last(middle(first(x).to(middle->weight.scalar_type())).to(dtype));
  }
  torch::nn::Linear first{nullptr}, middle{nullptr}, last{nullptr};
};
FSDP2_MODULE(TwoDtypes);

int64_t padded_bytes(const std::vector<Tensor>& params, int64_t ranks) {
  int64_t bytes = 0;
  for (const Tensor& param : params) {
    const int64_t rows = (param.size(0) + ranks - 1) / ranks * ranks;
    bytes += rows * (param.numel() / param.size(0)) * param.element_size();
  }
  return bytes;
}

void expect_like_whole_with_two_dtypes(int rank) {
  const int size = fsdp2::get_world_size();
  torch::manual_seed(4);
  TwoDtypes reference, model;
  copy_state(*model, *reference);
  fsdp2::fully_shard(model);
  const Tensor x = torch::randint(-1, 2, {2 * size, 6}, torch::kFloat);
  fsdp2::reset_counters();
  model(x.narrow(0, 2 * rank, 2)).sum().backward();
  (reference(x).sum() / size).backward();
  const auto counters = fsdp2::counters();
  EXPECT_EQ(counters.all_gathers, 2);  // one per dtype; the root stays whole until backward
  EXPECT_EQ(counters.reduce_scatters, 2);
  EXPECT_EQ(counters.bytes, 2 * padded_bytes(reference->parameters(), size));
  const double exact = size == 2 ? 0 : 0.5;  // thirds are rounded to bfloat16
  for (const auto& named : reference->named_parameters()) {
    const Tensor& param = model->named_parameters()[named.key()];
    EXPECT_EQ(param.scalar_type(), named.value().scalar_type()) << named.key();
    EXPECT_EQ(param.grad().scalar_type(), named.value().scalar_type()) << named.key();
    EXPECT_LE(max_difference(whole(param.grad()), named.value().grad()), exact) << named.key();
  }

  torch::optim::SGD optimizer(model->parameters(), 1e-3), expected_optimizer(reference->parameters(), 1e-3);
  for (int step = 0; step < 3; ++step) {
    optimizer.step();
    optimizer.zero_grad();
    expected_optimizer.step();
    expected_optimizer.zero_grad();
    model(x.narrow(0, 2 * rank, 2)).mean().backward();
    reference(x).mean().backward();
    for (const auto& named : reference->named_parameters()) {
      const Tensor& param = model->named_parameters()[named.key()];
      EXPECT_LE(max_difference(whole(param), named.value().detach()), 2e-2) << named.key() << " step " << step;
    }
  }
}

RANKS_TEST(Row12, TwoDtypesInOneGroupTrainLikeWholeOnTwo, 2) { expect_like_whole_with_two_dtypes(rank); }
RANKS_TEST(Row12, TwoDtypesInOneGroupTrainLikeWholeOnThree, 3) { expect_like_whole_with_two_dtypes(rank); }

RANKS_TEST(Row12, OneComputationDtypeNeedsOneCollective, 2) {
  torch::manual_seed(4);
  TwoDtypes model;
  fsdp2::fully_shard(model, {.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
  fsdp2::reset_counters();
  model(torch::ones({2, 6})).sum().backward();
  EXPECT_EQ(fsdp2::counters().all_gathers, 1);
  EXPECT_EQ(fsdp2::counters().reduce_scatters, 1);
  EXPECT_EQ(model->first->weight.grad().scalar_type(), torch::kFloat);
  EXPECT_EQ(model->middle->weight.grad().scalar_type(), torch::kBFloat16);
}

// ---- Row 14

struct TiedHeadImpl : torch::nn::Module {
  explicit TiedHeadImpl(const Tensor& tied) { weight = register_parameter("weight", tied); }
  Tensor forward(const Tensor& x) { return torch::matmul(x, weight.t()); }
  void reset_parameters() { torch::nn::init::uniform_(weight, -0.1, 0.1); }
  Tensor weight;
};
FSDP2_MODULE(TiedHead);

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    embed = register_module("embed", fsdp2::Hooked<torch::nn::Embedding>(8, 4));
    body = register_module("body", Linear(torch::nn::LinearOptions(4, 4)));
    head = register_module("head", TiedHead(embed->weight));
  }
  Tensor forward(const Tensor& tokens) { return head(torch::tanh(body(embed(tokens)))); }
  void reset_parameters() {}
  fsdp2::Hooked<torch::nn::Embedding> embed{nullptr};
  Linear body{nullptr};
  TiedHead head{nullptr};
};
FSDP2_MODULE(Tied);

Tensor loss_of(Tied& model, const Tensor& tokens) {
  return torch::nn::functional::cross_entropy(model(tokens).flatten(0, 1), tokens.flatten());
}

void expect_tied(Tied& model) {
  const Tensor &embed = model->embed->weight, &head = model->head->weight;
  EXPECT_EQ(embed.unsafeGetTensorImpl(), head.unsafeGetTensorImpl());
  EXPECT_EQ(model->named_parameters()["head.weight"].unsafeGetTensorImpl(), embed.unsafeGetTensorImpl());
  auto root = fsdp2::fsdp_module(model);
  root.unshard();
  EXPECT_EQ(embed.data_ptr(), head.data_ptr());
  root.reshard();
  EXPECT_EQ(fsdp2::DTensor(embed.detach()).to_local().data_ptr(), fsdp2::DTensor(head.detach()).to_local().data_ptr());
}

void train_both(int rank, Tied& model, Tied& reference) {
  const int size = fsdp2::get_world_size();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.05));
  torch::optim::AdamW expected_optimizer(reference->parameters(), torch::optim::AdamWOptions(0.05));
  for (int step = 0; step < 3; ++step) {
    const Tensor tokens = torch::randint(8, {2 * size, 3});
    loss_of(model, tokens.narrow(0, 2 * rank, 2)).backward();
    loss_of(reference, tokens).backward();
    const Tensor &grad = model->embed->weight.grad(), &expected = reference->embed->weight.grad();
    EXPECT_LE(max_difference(whole(grad), expected), 1e-6) << "step " << step;
    optimizer.step();
    optimizer.zero_grad();
    expected_optimizer.step();
    expected_optimizer.zero_grad();
    for (const auto& named : reference->named_parameters()) {
      const Tensor now = whole(model->named_parameters()[named.key()]);
      EXPECT_LE(max_difference(now, named.value().detach()), 1e-5) << named.key() << " step " << step;
    }
  }
}

RANKS_TEST(Row14, BothUsersInOneGroupStayTiedAndTrainLikeWhole, 2) {
  torch::manual_seed(6);
  Tied reference, model;
  copy_state(*model, *reference);
  fsdp2::fully_shard(model->body);
  auto root = fsdp2::fully_shard(model);
  EXPECT_EQ(root.param_fqns(), std::vector<std::string>{"embed.weight"});
  EXPECT_EQ(fsdp2::num_parameters(model), 8 * 4 + 4 * 4 + 4);
  expect_tied(model);
  train_both(rank, model, reference);
  expect_tied(model);

  fsdp2::reset_counters();
  loss_of(model, torch::zeros({1, 2}, torch::kLong)).backward();
  constexpr int64_t kTiedBytes = 8 * 4 * 4, kBodyBytes = (4 * 4 + 4) * 4;
  EXPECT_EQ(fsdp2::counters().bytes, 2 * kTiedBytes + 3 * kBodyBytes);  // gathered and reduced once, not per user
}

RANKS_TEST(Row14, StillTiedAfterMaterialisingAndWritingAnew, 2) {
  torch::manual_seed(6);
  Tied reference, model{nullptr};
  { fsdp2::MetaDeviceGuard meta; model = Tied(); }
  fsdp2::fully_shard(model->body);
  fsdp2::fully_shard(model);
  for (int i = 0; i < 2; ++i) {
    fsdp2::to_empty(model, torch::kCPU);
    torch::manual_seed(7 + i);
    fsdp2::reset_parameters(model);
    torch::manual_seed(7 + i);
    const Tensor expected = torch::empty({8, 4}).normal_();  // of the first owner, the embedding
    EXPECT_EQ(max_difference(whole(model->head->weight), expected), 0);
    expect_tied(model);
  }
  torch::NoGradGuard no_grad;
  for (auto& named : reference->named_parameters()) {
    named.value().copy_(whole(model->named_parameters()[named.key()]));
  }
  torch::AutoGradMode grad(true);
  train_both(rank, model, reference);
  expect_tied(model);
}

TEST(Row14, SavedOncePerNameAndStillTiedAfterALoad) {
  const TempDir folder;
  const std::string path = folder.path() + "/tied";
  ASSERT_TRUE(run_ranks(2, [&](int) {
    torch::manual_seed(8);
    Tied model;
    fsdp2::fully_shard(model->body);
    fsdp2::fully_shard(model);
    const auto saved = fsdp2::dcp::save(fsdp2::get_model_state_dict(model), path);
    std::vector<std::string> names;
    for (const auto& entry : saved.entries) names.push_back(entry.first);
    std::sort(names.begin(), names.end());
    EXPECT_EQ(names, (std::vector<std::string>{"body.bias", "body.weight", "embed.weight", "head.weight"}));
  }));
  ASSERT_TRUE(run_ranks(3, [&](int rank) {
    torch::manual_seed(8);
    Tied reference;
    torch::manual_seed(9);
    Tied model;
    fsdp2::fully_shard(model->body);
    fsdp2::fully_shard(model);
    auto state = fsdp2::get_model_state_dict(model);
    fsdp2::dcp::load(state, path);
    fsdp2::set_model_state_dict(model, state);
    EXPECT_EQ(max_difference(whole(model->head->weight), reference->embed->weight.detach()), 0);
    expect_tied(model);
    train_both(rank, model, reference);
  }));
}

void shard_blockwise(Tied& model, const fsdp2::FullyShardOptions& options = {}) {
  fsdp2::fully_shard(model->embed, options);
  fsdp2::fully_shard(model->body, options);
  fsdp2::fully_shard(model->head, options);
}

RANKS_TEST(Row14, UsersInTwoGroupsShareTheGroupAboveBoth, 2) {
  const fsdp2::ReshardAfterForward settings[] = {std::nullopt, true, false};
  for (const auto& setting : settings) {
    torch::manual_seed(6);
    Tied reference, model;
    copy_state(*model, *reference);
    shard_blockwise(model, {.reshard_after_forward = setting});
    auto root = fsdp2::fully_shard(model, {.reshard_after_forward = setting});
    EXPECT_EQ(fsdp2::num_parameters(model), 8 * 4 + 4 * 4 + 4);
    train_both(rank, model, reference);
    EXPECT_EQ(root.param_fqns(), std::vector<std::string>{"embed.weight"});
    EXPECT_TRUE(fsdp2::fsdp_module(model->embed).param_fqns().empty());
    EXPECT_TRUE(fsdp2::fsdp_module(model->head).param_fqns().empty());
    expect_tied(model);

    fsdp2::reset_counters();
    loss_of(model, torch::zeros({1, 2}, torch::kLong)).backward();
    EXPECT_EQ(fsdp2::counters().reduce_scatters, 2);  // of the root and the body
    EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
  }
}

struct AroundImpl : torch::nn::Module {
  AroundImpl() {
    inner = register_module("inner", Tied());
    last = register_module("last", linear(8, 8));
  }
  Tensor forward(const Tensor& tokens) { return last(inner(tokens)); }
  Tied inner{nullptr};
  Linear last{nullptr};
};
FSDP2_MODULE(Around);

RANKS_TEST(Row14, TheLowestGroupAboveBothUsersIsTaken, 2) {
  torch::manual_seed(6);
  Around reference, model;
  copy_state(*model, *reference);
  shard_blockwise(model->inner);
  fsdp2::fully_shard(model->inner);
  fsdp2::fully_shard(model);
  const Tensor tokens = torch::randint(8, {4, 3});
  for (int i = 0; i < 2; ++i) {
    model(tokens.narrow(0, 2 * rank, 2)).square().mean().backward();
    reference(tokens).square().mean().backward();
    EXPECT_LE(max_difference(whole(model->inner->head->weight.grad()), reference->inner->embed->weight.grad()), 1e-6);
  }
  EXPECT_EQ(fsdp2::fsdp_module(model).param_fqns(), std::vector<std::string>{"last.weight"});
  EXPECT_EQ(fsdp2::fsdp_module(model->inner).param_fqns(), std::vector<std::string>{"inner.embed.weight"});
  EXPECT_EQ(model->inner->embed->weight.unsafeGetTensorImpl(), model->inner->head->weight.unsafeGetTensorImpl());
}

RANKS_TEST(Row14, UsersWithoutAGroupAboveBothAreRefused, 2) {
  Tied model;
  EXPECT_FSDP2_ERROR(shard_blockwise(model);
                     model(torch::zeros({1, 2}, torch::kLong)), kUsage, "no fully_shard call covers all its users");
}

RANKS_TEST(Row14, TwoTensorsOverOneMemoryAreRefusedAndDoNotDriftApart, 2) {
  struct ViewsImpl : torch::nn::Module {
    ViewsImpl() {
      embed = register_module("embed", torch::nn::Embedding(8, 4));
      head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(4, 8).bias(false)));
      head->weight.set_data(embed->weight);
    }
    Tensor forward(const Tensor& tokens) { return head(embed(tokens)); }
    torch::nn::Embedding embed{nullptr};
    torch::nn::Linear head{nullptr};
  };
  EXPECT_FSDP2_ERROR(fsdp2::fully_shard(std::make_shared<ViewsImpl>()), kInvalidArgument,
                     "embed.weight and head.weight");
}

}  // namespace
