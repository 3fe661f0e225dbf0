// labels: ranks
// check_parity: silent where the sharded program is right, and the first difference by name where it is not.

#include <algorithm>
#include <iterator>

#include "fsdp/models.h"
#include "support/ranks.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::check_parity;
using fsdp2::parity_side;
using fsdp2::ParityBatch;
using fsdp2::ParityReport;
using fsdp2::ParitySide;
using torch::Tensor;

// In float64: rounding does not count.
struct PairImpl : torch::nn::Module {
  explicit PairImpl(int64_t out = 3, double dropout = 0) {
    first = register_module("first", linear(4, 5, true));
    drop = register_module("drop", torch::nn::Dropout(dropout));
    second = register_module("second", linear(5, out, true));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) { return second(drop(torch::tanh(first(x)))); }
  Linear first{nullptr}, second{nullptr};
  torch::nn::Dropout drop{nullptr};
};
FSDP2_MODULE(Pair);

const auto mean_loss = [](Pair& model, const ParityBatch& batch) { return torch::mse_loss(model(batch[0]), batch[1]); };
const auto sum_loss = [](Pair& model, const ParityBatch& batch) { return (model(batch[0]) - batch[1]).pow(2).sum(); };

template <class Loss>
ParitySide side(Pair model, Loss loss, double rate = 0.1) {
  return parity_side(model, torch::optim::SGD(model->parameters(), rate), loss);
}
Pair sharded(Pair model) {
  fsdp2::fully_shard(model->first);
  fsdp2::fully_shard(model->second);
  fsdp2::fully_shard(model);
  return model;
}
ParitySide make_plain() { return side(Pair(), mean_loss); }
ParitySide make_sharded() { return side(sharded(Pair()), mean_loss); }

std::vector<ParityBatch> batches() {
  torch::manual_seed(3);
  std::vector<ParityBatch> all;
  for (int i = 0; i < 2; ++i)
    all.push_back({torch::randn({4, 4}, torch::kDouble), torch::randn({4, 3}, torch::kDouble)});
  return all;
}

RANKS_TEST(CheckParity, ARightProgramIsEqual, 2) {
  torch::manual_seed(rank);  // the factories' own values differ: they are made equal
  const ParityReport report = check_parity(make_plain, make_sharded, batches(), 3, 1e-12);
  EXPECT_TRUE(report.ok) << report.to_string();
  EXPECT_EQ(report.plain_losses.size(), 3u);
  EXPECT_TRUE(report.differences.empty());
  EXPECT_GT(report.plain_losses[0], report.plain_losses[2]);  // batch 0 again, after two steps
  EXPECT_NEAR(report.plain_losses[2], report.sharded_losses[2], 1e-12);
  EXPECT_NE(report.to_string().find("check_parity: equal after 3 steps"), std::string::npos) << report.to_string();
}

RANKS_TEST(CheckParity, InputsMayBeAFunction, 2) {
  const auto inputs = [](int64_t step) {
    torch::manual_seed(step);
    return ParityBatch{torch::randn({2, 4}, torch::kDouble), torch::randn({2, 3}, torch::kDouble)};
  };
  EXPECT_TRUE(check_parity(make_plain, make_sharded, inputs, 2, 1e-12).ok);
  EXPECT_TRUE(check_parity(make_plain, make_sharded, inputs, 2, 1e-12, {.split_batch = false}).ok);
}

RANKS_TEST(CheckParity, AnOtherLearningRateIsTheFirstWeight, 2) {
  const ParityReport report = check_parity(
      make_plain, [] { return side(sharded(Pair()), mean_loss, 0.2); }, batches(), 3, 1e-9);
  ASSERT_FALSE(report.ok);
  EXPECT_EQ(report.differences[0].kind, "weight");
  EXPECT_EQ(report.differences[0].fqn, "first.weight");
  EXPECT_EQ(report.differences[0].step, 0);
  EXPECT_EQ(report.plain_losses.size(), 1u);  // no step after the one that differs
  EXPECT_NE(report.to_string().find("first difference: weight of first.weight differs in step 0"), std::string::npos);
}

RANKS_TEST(CheckParity, TheDifferenceIsTheLargestElementwise, 2) {
  // In the second step the sharded side's loss counts 1/8 of its last layer's bias more: the gradient is off by that.
  const auto make = [] {
    auto calls = std::make_shared<int>(0);
    return side(sharded(Pair()), [calls](Pair& model, const ParityBatch& batch) {
      const Tensor loss = torch::mse_loss(model(batch[0]), batch[1]);
      return ++*calls == 2 ? loss + 0.125 * model(batch[0]).mean(0).sum() : loss;
    });
  };
  const ParityReport report = check_parity(make_plain, make, batches(), 4, 1e-9);
  ASSERT_FALSE(report.ok);
  EXPECT_EQ(report.differences[0].kind, "loss");
  EXPECT_EQ(report.differences[0].step, 1);
  bool seen = false;
  for (const auto& each : report.differences) {
    if (each.kind != "gradient" || each.fqn != "second.bias") continue;
    seen = true;
    EXPECT_NEAR(each.difference, 0.125, 1e-12);  // every gradient is below 1, so it is not scaled
  }
  EXPECT_TRUE(seen) << report.to_string();
}

RANKS_TEST(CheckParity, ASumWhereAMeanIsMeantIsNamed, 2) {
  const ParityReport report = check_parity([] { return side(Pair(), sum_loss, 0.01); },
                                           [] { return side(sharded(Pair()), sum_loss, 0.01); }, batches(), 1, 1e-9);
  ASSERT_FALSE(report.ok);
  ASSERT_EQ(report.notes.size(), 1u) << report.to_string();
  EXPECT_NE(report.notes[0].find("2 times the sharded ones: the loss is a sum"), std::string::npos);
}

RANKS_TEST(CheckParity, OtherNamesAndShapesRunNoStep, 2) {
  const ParityReport shapes = check_parity(
      make_plain, [] { return side(sharded(Pair(2)), mean_loss); }, batches());
  ASSERT_EQ(shapes.differences.size(), 2u) << shapes.to_string();
  EXPECT_EQ(shapes.differences[0].text, "second.weight is [3, 5] in the plain model and [2, 5] in the sharded one");
  EXPECT_TRUE(shapes.plain_losses.empty());
  const ParityReport names = check_parity(
      [] {
        Pair model;
        model->register_parameter("extra", torch::zeros({1}, torch::kDouble));
        return side(model, mean_loss);
      },
      make_sharded, batches());
  ASSERT_EQ(names.differences.size(), 1u);
  EXPECT_EQ(names.differences[0].kind, "parameter names");
  EXPECT_EQ(names.differences[0].fqn, "extra");
  // On one rank alone: the others stop too.
  const ParityReport one = check_parity(
      make_plain,
      [&] {
        Pair model;
        if (rank == 1) model->register_buffer("late", torch::zeros({1}));
        return side(sharded(model), mean_loss);
      },
      batches());
  EXPECT_FALSE(one.ok);
  EXPECT_NE(one.to_string().find("late"), std::string::npos) << one.to_string();
}

RANKS_TEST(CheckParity, DropoutIsWarnedOf, 2) {
  std::string warned;
  fsdp2::set_log_sink([&](fsdp2::LogLevel, const std::string& text) { warned += text; });
  const ParityReport report = check_parity([] { return side(Pair(3, 0.5), mean_loss); },
                                           [] { return side(sharded(Pair(3, 0.5)), mean_loss); }, batches(), 1);
  fsdp2::set_log_sink({});
  ASSERT_FALSE(report.notes.empty());
  EXPECT_NE(report.notes[0].find("dropout draws other numbers"), std::string::npos);
  EXPECT_NE(report.notes[0].find("(drop)"), std::string::npos);
  EXPECT_EQ(warned.find("dropout") != std::string::npos, rank == 0);
}

RANKS_TEST(CheckParity, OwnWeightsNeedOneSeed, 2) {
  const auto seeded = [](int seed) {
    return [seed] {
      torch::manual_seed(seed);
      return make_plain();
    };
  };
  const auto seeded_sharded = [] {
    torch::manual_seed(5);
    return make_sharded();
  };
  const fsdp2::ParityOptions own{.copy_weights = false};
  EXPECT_TRUE(check_parity(seeded(5), seeded_sharded, batches(), 2, 1e-12, own).ok);
  EXPECT_FALSE(check_parity(seeded(6), seeded_sharded, batches(), 2, 1e-12, own).ok);
}

RANKS_TEST(CheckParity, AModelOnMetaIsFilled, 2) {
  const auto make = [] {
    Pair model = nullptr;
    {
      const fsdp2::MetaDeviceGuard meta;
      model = Pair();
    }
    return side(sharded(model), mean_loss);
  };
  EXPECT_TRUE(check_parity(make_plain, make, batches(), 2, 1e-12).ok);
}

RANKS_TEST(CheckParity, ThePageShowsThis, 2) {
  const auto loss = [](auto& net, const fsdp2::ParityBatch& batch) { return torch::mse_loss(net(batch[0]), batch[1]); };
  const auto make_plain = [&] {
    Pair net;
    return fsdp2::parity_side(net, torch::optim::SGD(net->parameters(), 0.1), loss);
  };
  const auto make_sharded = [&] {
    Pair net;
    for (auto& layer : {net->first, net->second}) fsdp2::fully_shard(layer);
    fsdp2::fully_shard(net);
    return fsdp2::parity_side(net, torch::optim::SGD(net->parameters(), 0.1), loss);
  };
  const fsdp2::ParityReport report = fsdp2::check_parity(make_plain, make_sharded, batches(), /*steps=*/3);
  if (fsdp2::get_rank() == 0) std::cerr << report.to_string();
  EXPECT_TRUE(report.ok) << report.to_string();

  Pair net = sharded(Pair());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const fsdp2::Diagnosis found = fsdp2::diagnose(net, &optimizer);
  if (fsdp2::get_rank() == 0) std::cerr << found.to_table();
  EXPECT_EQ(found.size(), 1u) << found.to_table();  // its groups are small
}

std::string without_spaces(const std::string& text) {
  std::string result;
  std::copy_if(text.begin(), text.end(), std::back_inserter(result), [](char c) { return c != ' ' && c != '\n'; });
  return result;
}

TEST(CheckParity, TheProgramsOfThePageAreThoseThatRun) {
  const std::string page = read_file(test_file("../docs/diagnose.md")),
                    own = without_spaces(read_file(test_file("diagnose/check_parity_test.cpp")));
  int blocks = 0;
  for (size_t at = page.find("```cpp\n"); at != std::string::npos; at = page.find("```cpp\n", at)) {
    const size_t begin = at + 7, end = page.find("```", begin);
    const std::string block = without_spaces(page.substr(begin, end - begin));
    EXPECT_NE(own.find(block), std::string::npos) << page.substr(begin, end - begin);
    at = end + 3;
    ++blocks;
  }
  EXPECT_EQ(blocks, 2);
}

RANKS_TEST(CheckParity, ArgumentsThatCannotBe, 2) {
  EXPECT_FSDP2_ERROR(check_parity(make_plain, make_sharded, batches(), 0), kInvalidArgument, "steps is 0");
  const std::vector<ParityBatch> odd{{torch::randn({3, 4}, torch::kDouble), torch::randn({3, 3}, torch::kDouble)}};
  EXPECT_FSDP2_ERROR(check_parity(make_plain, make_sharded, odd), kInvalidArgument, "multiple of the 2 ranks");
  const auto no_scalar = [](Pair& model, const ParityBatch& batch) { return model(batch[0]); };
  EXPECT_FSDP2_ERROR(check_parity([&] { return side(Pair(), no_scalar); }, make_sharded, batches()), kInvalidArgument,
                     "expected a scalar");
  EXPECT_FSDP2_ERROR(check_parity([] { return ParitySide(); }, make_sharded, batches()), kInvalidArgument,
                     "without a module");
}

}  // namespace
