// labels: ranks
// backends: gloo, shm
// Several modules as one group, also where a forward runs only some of them: chunked losses, tied weights, exceptions.

#include <fsdp2/detail/trace.h>

#include "fsdp/parity.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

constexpr int64_t kVocab = 10, kDim = 6, kTokens = 8;

struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const Tensor& value) { weight = register_parameter("weight", value); }
  Tensor forward(const Tensor& x) { return torch::matmul(x, weight.t()); }
  Tensor weight;
};
FSDP2_MODULE(Head);

/// The head may be left to the caller, who runs it on parts of what forward returns.
struct LanguageImpl : torch::nn::Module {
  explicit LanguageImpl(bool tie) {
    embed = register_module("embed", fsdp2::Hooked<torch::nn::Embedding>(kVocab, kDim));
    body = register_module("body", linear(kDim, kDim));
    norm = register_module("norm", fsdp2::Hooked<torch::nn::LayerNorm>(torch::nn::LayerNormOptions({kDim})));
    head = register_module("head", Head(tie ? embed->weight : torch::randn({kVocab, kDim})));
  }
  Tensor forward(const Tensor& tokens, bool skip_head) {
    Tensor h = body(embed(tokens));
    if (fails == 1) throw std::runtime_error("made to fail before the group");
    h = norm(h);
    if (fails == 2) throw std::runtime_error("made to fail within the group");
    return skip_head ? h : head(h);
  }
  fsdp2::Hooked<torch::nn::Embedding> embed{nullptr};
  Linear body{nullptr};
  fsdp2::Hooked<torch::nn::LayerNorm> norm{nullptr};
  Head head{nullptr};
  int fails = 0;
};
FSDP2_MODULE(Language);

struct Options {
  fsdp2::FullyShardOptions outer = {}, inner = {};
};

void shard(Language& model, bool grouped, bool tied, const Options& options) {
  fsdp2::fully_shard(model->body, options.outer);
  if (grouped && tied) {
    fsdp2::fully_shard({model->embed, model->norm, model->head}, options.inner);
  } else {
    fsdp2::fully_shard(model->embed, options.outer);
    if (grouped) {
      fsdp2::fully_shard({model->norm, model->head}, options.inner);
    } else {
      fsdp2::fully_shard(model->norm, options.inner);
      fsdp2::fully_shard(model->head, options.inner);
    }
  }
  fsdp2::fully_shard(model, options.outer);
}

Options same(const fsdp2::ReshardAfterForward& setting) {
  const fsdp2::FullyShardOptions options{.reshard_after_forward = setting};
  return {.outer = options, .inner = options};
}

Tensor random_tokens() { return torch::randint(kVocab, {2 * fsdp2::get_world_size(), kTokens}); }

/// The loss part by part, each with a backward of its own, then backward through the rest of the model. Returns the
/// head's gradient after each part.
std::vector<Tensor> run_chunked(Language& model, const Tensor& tokens, double divisor, at::ScalarType compute,
                                at::ScalarType out_dtype, int64_t chunks = 4, bool gradients = true) {
  const Tensor h = model(tokens, true);
  EXPECT_EQ(h.scalar_type(), out_dtype);
  std::vector<Tensor> h_gradients, head_gradients;
  for (const Tensor& part : h.detach().to(compute).chunk(chunks, 1)) {
    const Tensor chunk = part.clone().requires_grad_();
    const Tensor out = model->head(chunk);
    EXPECT_EQ(out.scalar_type(), out_dtype);
    (out.pow(2).sum() / divisor).backward();
    h_gradients.push_back(chunk.grad());
    if (gradients) head_gradients.push_back(whole(model->head->weight.grad()));
  }
  h.backward(torch::cat(h_gradients, 1).to(h.scalar_type()));
  return head_gradients;
}

void step_all(const std::vector<torch::optim::Optimizer*>& optimizers, bool to_none) {
  for (auto* each : optimizers) {
    each->step();
    each->zero_grad(to_none);
  }
}

std::pair<Language, Language> language_twins(bool tied) { return make_twins<Language>(tied); }

// ----- chunked losses -----

RANKS_TEST(ListGroup, APartlyRunGroupTrainsLikeWhole, 2) {
  for (const fsdp2::ReshardAfterForward& setting : std::vector<fsdp2::ReshardAfterForward>{true, false, 1}) {
    for (const bool tied : {false, true}) {
      torch::manual_seed(42);
      auto [reference, model] = language_twins(tied);
      shard(model, true, tied, same(setting));
      torch::optim::Adam optimizer(model->parameters(), 1e-2), expected_optimizer(reference->parameters(), 1e-2);
      const Tensor tokens = random_tokens();
      for (int step = 0; step < 3; ++step) {
        const std::string where = c10::str("tied ", tied, " step ", step);
        const auto seen = run_chunked(model, rows_of(tokens, rank), 1, torch::kDouble, torch::kDouble);
        const auto expected = run_chunked(reference, tokens, 2, torch::kDouble, torch::kDouble);
        for (size_t i = 0; i < seen.size(); ++i) {
          EXPECT_LE(max_difference(seen[i], expected[i]), 1e-9) << where << " after part " << i;
        }
        expect_same_gradients(*model, *reference, where);
        step_all({&optimizer, &expected_optimizer}, step % 2 == 0);
        expect_same_values(*model, *reference, where);
      }
      EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
    }
  }
}

// Outputs of a member are cast at its call; the root alone could not hide a missing cast.
RANKS_TEST(ListGroup, APartlyRunGroupCastsOutputsLikeSeparateGroups, 2) {
  const fsdp2::MixedPrecisionPolicy narrow_out{.param_dtype = torch::kFloat, .output_dtype = torch::kBFloat16};
  for (const bool everywhere : {false, true}) {
    for (const bool reshard : {false, true}) {
      for (const bool tied : {false, true}) {
        Options options = same(reshard);
        options.inner.mp_policy = narrow_out;
        options.outer.mp_policy = everywhere ? narrow_out : fsdp2::MixedPrecisionPolicy{.param_dtype = torch::kFloat};
        torch::manual_seed(42);
        Language grouped(tied), separate(tied);
        copy_state(*separate, *grouped);
        shard(grouped, true, tied, options);
        if (!tied) shard(separate, false, tied, options);
        torch::optim::Adam optimizer(grouped->parameters(), 1e-2), other(separate->parameters(), 1e-2);
        const Tensor tokens = rows_of(random_tokens(), rank);
        for (int step = 0; step < 2; ++step) {
          const auto seen = run_chunked(grouped, tokens, 1, torch::kFloat, torch::kBFloat16);
          if (!tied) {
            const auto expected = run_chunked(separate, tokens, 1, torch::kFloat, torch::kBFloat16);
            for (size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(max_difference(seen[i], expected[i]), 0) << i;
            for (const auto& named : grouped->named_parameters()) {
              const Tensor& theirs = separate->named_parameters()[named.key()];
              EXPECT_EQ(max_difference(whole(named.value().grad()), whole(theirs.grad())), 0) << named.key();
            }
          }
          for (size_t i = 1; i < seen.size(); ++i) EXPECT_GT(max_difference(seen[i], seen[i - 1]), 0) << i;
          optimizer.step();
          optimizer.zero_grad();
          if (!tied) step_all({&other}, true);
        }
      }
    }
  }
}

RANKS_TEST(ListGroup, AccumulationOverChunksEqualsSeparateGroupsAndWhole, 2) {
  constexpr int kMicros = 3;
  for (const bool reshard : {true, false}) {
    torch::manual_seed(42);
    auto [reference, grouped] = language_twins(false);
    Language separate(false);
    separate->to(torch::kDouble);
    copy_state(*separate, *reference);
    shard(grouped, true, false, same(reshard));
    shard(separate, false, false, same(reshard));
    for (int micro = 0; micro < kMicros; ++micro) {
      const Tensor tokens = random_tokens();
      for (Language* model : {&grouped, &separate}) {
        auto root = fsdp2::fsdp_module(*model);
        root.set_requires_gradient_sync(micro + 1 == kMicros);
        root.set_is_last_backward(micro + 1 == kMicros);
        run_chunked(*model, rows_of(tokens, rank), 1, torch::kDouble, torch::kDouble, 2, false);
      }
      run_chunked(reference, tokens, 2, torch::kDouble, torch::kDouble, 2, false);
    }
    expect_same_gradients(*grouped, *reference, "grouped");
    expect_same_gradients(*separate, *reference, "separate");
  }
}

// Kept whole through the loop over the parts, and freed by hand after it.
RANKS_TEST(ListGroup, ReshardingIsSwitchedOffForTheLoopOverChunks, 2) {
  for (const bool tied : {false, true}) {
    for (const bool resharded_before : {false, true}) {
      const std::string where = c10::str("tied ", tied, " resharded before ", resharded_before);
      torch::manual_seed(42);
      auto [reference, model] = language_twins(tied);
      Options options;
      options.inner.reshard_after_forward = resharded_before;
      shard(model, true, tied, options);
      int gathers = 0;  // of the group with the head
      fsdp2::detail::set_trace([&](const char* event, const std::string& module) {
        gathers += std::string(event) == "unshard" && module.find("head") != std::string::npos;
      });
      auto head = fsdp2::fsdp_module(model->head);
      torch::optim::Adam optimizer(model->parameters(), 1e-2), expected_optimizer(reference->parameters(), 1e-2);
      const Tensor all = random_tokens();
      for (int step = 0; step < 3; ++step) {
        const Tensor h = model(rows_of(all, rank), true);
        const bool whole_before = head.is_unsharded();
        EXPECT_EQ(whole_before, !resharded_before && step == 0) << where;
        head.set_reshard_after_forward(false);
        head.set_reshard_after_backward(false);
        gathers = 0;
        fsdp2::reset_counters();
        std::vector<Tensor> h_gradients;
        for (const Tensor& part : h.detach().chunk(4, 1)) {
          const Tensor chunk = part.clone().requires_grad_();
          model->head(chunk).pow(2).sum().backward();
          h_gradients.push_back(chunk.grad());
          EXPECT_TRUE(head.is_unsharded()) << where;
        }
        EXPECT_EQ(gathers, whole_before ? 0 : 1) << where;
        EXPECT_EQ(fsdp2::counters().reduce_scatters, 4) << where;
        head.set_reshard_after_forward(true);
        head.set_reshard_after_backward(true);
        head.reshard();
        EXPECT_FALSE(head.is_unsharded()) << where;
        h.backward(torch::cat(h_gradients, 1));
        run_chunked(reference, all, 2, torch::kDouble, torch::kDouble);
        expect_same_gradients(*model, *reference, where);
        step_all({&optimizer, &expected_optimizer}, step % 2 == 0);
      }
      fsdp2::detail::set_trace({});
    }
  }
}

RANKS_TEST(ListGroup, TwoPartialForwardsBeforeOneBackward, 2) {
  torch::manual_seed(42);
  auto [reference, model] = language_twins(false);
  fsdp2::fully_shard({model->norm, model->head});
  fsdp2::fully_shard(model);
  const Tensor first = random_tokens(), second = random_tokens();
  const Tensor h1 = model(rows_of(first, rank), true), h2 = model(rows_of(second, rank), true);
  (h1.pow(3).sum() + h2.sin().sum()).backward();
  ((reference(first, true).pow(3).sum() + reference(second, true).sin().sum()) / 2).backward();
  EXPECT_FALSE(model->head->weight.grad().defined());
  expect_same_gradients(*model, *reference, "two forwards");
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
}

RANKS_TEST(ListGroup, ResetAfterAnExceptionInAPartialForward, 2) {
  torch::manual_seed(42);
  auto [reference, model] = language_twins(false);
  fsdp2::fully_shard({model->norm, model->head});
  auto root = fsdp2::fully_shard(model);
  for (const int fails : {1, 2}) {
    const Tensor tokens = random_tokens();
    model->fails = fails;
    EXPECT_THROW(model(rows_of(tokens, rank), true), std::runtime_error);
    model->fails = 0;
    root.reset_iter_state();
    EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
    model(rows_of(tokens, rank), false).pow(2).sum().backward();
    (reference(tokens, false).pow(2).sum() / 2).backward();
    expect_same_gradients(*model, *reference, c10::str("after failure ", fails));
    model->zero_grad();
    reference->zero_grad();
  }
}

// ----- casts, labels, order -----

RANKS_TEST(ListGroup, InputsOfEveryMemberAreCast, 2) {
  struct WideBetweenImpl : torch::nn::Module {
    WideBetweenImpl() {
      a = register_module("a", linear(4, 4));
      b = register_module("b", linear(4, 4));
    }
    Tensor forward(const Tensor& x) { return b(a(x).to(torch::kFloat)); }
    Linear a{nullptr}, b{nullptr};
  };
  auto model = std::make_shared<WideBetweenImpl>();
  {
    torch::NoGradGuard no_grad;
    model->a->weight.copy_(torch::eye(4) * 2);
    model->b->weight.copy_(torch::eye(4) * 3);
  }
  const fsdp2::MixedPrecisionPolicy policy{.param_dtype = torch::kBFloat16};
  fsdp2::fully_shard({model->a, model->b}, {.mp_policy = policy});
  fsdp2::fully_shard(model, {.mp_policy = policy});
  const Tensor x = torch::full({2, 4}, rank + 1.0f);
  const Tensor out = fsdp2::call(model, x);
  EXPECT_EQ(out.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(max_difference(out.detach(), 6 * x), 0);
  out.sum().backward();
  EXPECT_EQ(max_difference(whole(model->a->weight.grad()), torch::full({4, 4}, 2 * 1.5 * 3)), 0);
  EXPECT_EQ(max_difference(whole(model->b->weight.grad()), torch::full({4, 4}, 2 * 1.5 * 2)), 0);
}

struct LeavesOutImpl : torch::nn::Module {
  LeavesOutImpl() {
    unused = register_module("unused", linear(1, 1, true));
    used = register_module("used", linear(4, 4, true));
  }
  Tensor forward(const Tensor& x) { return torch::relu(used(x)); }
  Linear unused{nullptr}, used{nullptr};
};
FSDP2_MODULE(LeavesOut);

struct OuterImpl : torch::nn::Module {
  OuterImpl() {
    a = register_module("a", LeavesOut());
    b = register_module("b", LeavesOut());
    last = register_module("last", torch::nn::Linear(4, 4));
  }
  Tensor forward(const Tensor& x) { return last(b(a(x))); }
  LeavesOut a{nullptr}, b{nullptr};
  torch::nn::Linear last{nullptr};
};
FSDP2_MODULE(Outer);

// Groups of which a member never ran are completed when the root's forward ends: freed then, gathered when backward
// begins, the last one first. The first group's input has no gradient, so it is reduced when backward ends.
RANKS_TEST(ListGroup, AMemberThatNeverRunsDoesNotHoldTheGroupUp, 2) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Outer>();
  fsdp2::fully_shard({model->a->unused, model->a->used}, {.reshard_after_forward = true});
  fsdp2::fully_shard({model->b->unused, model->b->used}, {.reshard_after_forward = true});
  fsdp2::fully_shard(model);
  torch::optim::Adam optimizer(model->parameters(), 1e-2), expected_optimizer(reference->parameters(), 1e-2);
  std::vector<std::string> events;
  fsdp2::detail::set_trace([&](const char* event, const std::string& module) {
    if (std::string(event) == "unshard" || std::string(event) == "reduce")
      events.push_back(c10::str(event, " ", module));
  });
  for (int step = 0; step < 3; ++step) {
    const Tensor all = torch::randn({4, 4}, torch::kDouble);
    events.clear();
    const Tensor out = model(rows_of(all, rank));
    EXPECT_EQ(events, (std::vector<std::string>{"unshard ", "unshard a.unused, a.used", "unshard b.unused, b.used"}));
    EXPECT_FALSE(fsdp2::fsdp_module(model->a->used).is_unsharded());
    events.clear();
    out.sum().backward();
    EXPECT_EQ(events, (std::vector<std::string>{"unshard b.unused, b.used", "unshard a.unused, a.used",
                                                "reduce b.unused, b.used", "reduce ", "reduce a.unused, a.used"}));
    (reference(all).sum() / 2).backward();
    EXPECT_FALSE(model->a->unused->weight.grad().defined());
    expect_same_gradients(*model, *reference, "left out");
    step_all({&optimizer, &expected_optimizer}, true);
  }
  fsdp2::detail::set_trace({});
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
}

// ----- tied -----

constexpr int64_t kUneven = 17;  // rows on 4 ranks: 5, 5, 5, 2

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    embed = register_module("embed", fsdp2::Hooked<torch::nn::Embedding>(kUneven, kDim));
    mlp = register_module("mlp", Mlp(kDim));
    head = register_module("head", Head(embed->weight));
  }
  Tensor forward(const Tensor& tokens) {
    const Tensor x = embed(tokens);
    return head(x + mlp(x));
  }
  fsdp2::Hooked<torch::nn::Embedding> embed{nullptr};
  Mlp mlp{nullptr};
  Head head{nullptr};
};
FSDP2_MODULE(Tied);

enum class Ties { kListGroup, kRoot, kSeparateCalls };

RANKS_TEST(ListGroup, TiedWeightsWithUnevenRowsTrainLikeWhole, 4) {
  for (const Ties ties : {Ties::kListGroup, Ties::kRoot, Ties::kSeparateCalls}) {
    for (const bool reshard : {true, false}) {
      const fsdp2::FullyShardOptions options{.reshard_after_forward = reshard};
      torch::manual_seed(42);
      auto [reference, model] = make_twins<Tied>();
      const Tensor before = reference->embed->weight.detach().clone();
      fsdp2::fully_shard(model->mlp, options);
      if (ties == Ties::kListGroup) fsdp2::fully_shard({model->embed, model->head}, options);
      if (ties == Ties::kSeparateCalls) {  // they then belong to the lowest group that has both: the root's
        fsdp2::fully_shard(model->embed, options);
        fsdp2::fully_shard(model->head, options);
      }
      fsdp2::fully_shard(model, options);
      const auto next = [] { return torch::randint(kUneven, {2 * 4, 4}); };
      expect_trains_like(model, reference, rank, 4, next, c10::str("ties ", static_cast<int>(ties), " ", reshard));
      EXPECT_TRUE(model->head->weight.is_same(model->embed->weight));
      const Tensor changed = (whole(model->embed->weight) - before).abs().amax(1);
      EXPECT_TRUE(changed.gt(0).all().item<bool>());  // also the rows beside the padding
    }
  }
}

}  // namespace
