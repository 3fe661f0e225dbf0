// labels: peer, ranks
// Learning rates equal those of torch.optim.lr_scheduler, which runs in this test, also across a checkpoint.

#include <cmath>
#include <fstream>
#include <numbers>

#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <fsdp2/fsdp2.h>

#include "support/ranks.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::LRScheduler;
using fsdp2::dcp::StateDict;
using nlohmann::json;
using torch::optim::SGD;
namespace lr = fsdp2::lr_schedule;

const std::vector<double> kBaseLrs = {0.1, 3e-4, 2.0};
constexpr int kSteps = 25, kSavedAt = 4;

/// One group for each base rate, as in lr_scheduler_peer.py.
std::unique_ptr<SGD> make_optimizer(const std::vector<double>& base_lrs = kBaseLrs) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double base : base_lrs) {
    groups.emplace_back(std::vector<torch::Tensor>{torch::zeros({1}, torch::requires_grad())},
                        std::make_unique<torch::optim::SGDOptions>(base));
  }
  return std::make_unique<SGD>(std::move(groups), torch::optim::SGDOptions(1.0));
}

std::vector<double> rates_of(SGD& optimizer) {
  std::vector<double> rates;
  for (auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

void expect_near(const std::vector<double>& rates, const std::vector<double>& expected, const std::string& where) {
  ASSERT_EQ(rates.size(), expected.size());
  // Python goes from rate to rate, which rounds more than one formula.
  for (size_t i = 0; i < rates.size(); ++i) EXPECT_NEAR(rates[i], expected[i], 1e-13 * kBaseLrs[i]) << where;
}

struct Case {
  std::string python;
  lr::Schedule schedule;
};

std::vector<Case> cases() {
  const std::string warm = "L.LinearLR(o, 0.25, 1.0, 3)";
  return {
      {"L.ConstantLR(o)", lr::constant_lr()},
      {"L.ConstantLR(o, 0.5, 7)", lr::constant_lr(0.5, 7)},
      {"L.LinearLR(o)", lr::linear_lr()},
      {"L.LinearLR(o, 0.2, 0.7, 9)", lr::linear_lr(0.2, 0.7, 9)},
      {"L.StepLR(o, 4)", lr::step_lr(4)},
      {"L.MultiStepLR(o, [3, 3, 11], 0.3)", lr::multi_step_lr({3, 3, 11}, 0.3)},
      {"L.ExponentialLR(o, 0.9)", lr::exponential_lr(0.9)},
      {"L.PolynomialLR(o, 12, 2.0)", lr::polynomial_lr(12, 2)},
      {"L.CosineAnnealingLR(o, 10)", lr::cosine_annealing_lr(10)},
      {"L.LambdaLR(o, lambda step: 1 / (1 + step))", [](int64_t step) { return 1.0 / static_cast<double>(1 + step); }},
      {"L.SequentialLR(o, [L.ConstantLR(o, 0.1, 20), L.ExponentialLR(o, 0.9)], [5])",
       lr::sequential_lr({lr::constant_lr(0.1, 20), lr::exponential_lr(0.9)}, {5})},
      {"L.ChainedScheduler([L.ConstantLR(o, 0.1, 6), L.ExponentialLR(o, 0.9)])",
       lr::chained_lr({lr::constant_lr(0.1, 6), lr::exponential_lr(0.9)})},
      {"L.SequentialLR(o, [" + warm + ", L.CosineAnnealingLR(o, 22)], [3])", lr::warmup_cosine(3, 25)},
      {"L.SequentialLR(o, [" + warm + ", L.LinearLR(o, 1.0, 0.0, 12)], [3])", lr::warmup_linear(3, 15)},
      {"L.SequentialLR(o, [" + warm + ", L.ConstantLR(o, 1.0, 6), L.LinearLR(o, 1.0, 0.1, 5)], [3, 9])",
       lr::warmup_stable_decay({.warmup_steps = 3, .stable_steps = 6, .decay_steps = 5, .min_factor = 0.1})},
  };
}

TEST(LRScheduler, RatesEqualPythonsAlsoAcrossACheckpointEitherWay) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(1,
                        [&](int) {
                          const auto optimizer = make_optimizer();
                          auto scheduler = std::make_shared<LRScheduler>(*optimizer, lr::cosine_annealing_lr(10));
                          for (int i = 0; i < kSavedAt; ++i) scheduler->step();
                          fsdp2::dcp::save({{"lr", scheduler}}, folder.path() + "/cpp");
                        },
                        {.init_process_group = false}));
  json spec = {{"base_lrs", kBaseLrs},
               {"steps", kSteps},
               {"saved_at", kSavedAt},
               {"resumed", "L.CosineAnnealingLR(o, 10)"},
               {"expressions", json::array()}};
  for (const Case& each : cases()) spec["expressions"].push_back(each.python);
  const std::string in = folder.path() + "/cases.json", out = folder.path() + "/results.json";
  std::ofstream(in) << spec;
  const auto python = run_python(test_file("training/lr_scheduler_peer.py"), {in, out, folder.path()});
  ASSERT_EQ(python.exit_code, 0) << python.output;
  const json expected = json::parse(std::ifstream(out));

  ASSERT_TRUE(
      run_ranks(1,
                [&](int) {
                  for (const Case& each : cases()) {
                    const auto optimizer = make_optimizer();
                    LRScheduler scheduler(*optimizer, each.schedule);
                    for (int step = 0; step <= kSteps; ++step) {
                      const auto rates = expected[each.python][static_cast<size_t>(step)].get<std::vector<double>>();
                      const std::string where = each.python + " at step " + std::to_string(step);
                      expect_near(rates_of(*optimizer), rates, where);
                      EXPECT_EQ(scheduler.get_last_lr(), rates_of(*optimizer)) << where;
                      scheduler.step();
                    }
                  }
                  const json& whole = expected["L.CosineAnnealingLR(o, 10)"];
                  const auto optimizer = make_optimizer({1, 1, 1});
                  auto scheduler = std::make_shared<LRScheduler>(*optimizer, lr::cosine_annealing_lr(10));
                  StateDict state{{"lr", scheduler}};
                  fsdp2::dcp::load(state, folder.path() + "/py");
                  EXPECT_EQ(scheduler->base_lrs(), kBaseLrs);
                  for (size_t step = kSavedAt; step <= kSteps; ++step) {
                    expect_near(rates_of(*optimizer), whole[step].get<std::vector<double>>(), "resumed from Python");
                    expect_near(expected["resumed"][step - kSavedAt].get<std::vector<double>>(),
                                whole[step].get<std::vector<double>>(), "resumed by Python");
                    scheduler->step();
                  }
                },
                {.init_process_group = false}));
}

TEST(LRSchedule, WhatHasNoTwinFollowsItsFormula) {
  const lr::Schedule sqrt = lr::warmup_stable_decay(
      {.warmup_steps = 1, .stable_steps = 2, .decay_steps = 4, .decay = lr::Decay::OneMinusSqrt});
  const std::vector<double> expected = {0.5, 1, 1, 1, 0.5, 1 - std::sqrt(0.5), 1 - std::sqrt(0.75), 0, 0};
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(sqrt(static_cast<int64_t>(i)), expected[i], 1e-15) << i;
  const lr::Schedule floor = lr::warmup_cosine(0, 4, 0.1);
  EXPECT_DOUBLE_EQ(floor(0), 1);
  EXPECT_DOUBLE_EQ(floor(2), 0.55);
  EXPECT_DOUBLE_EQ(floor(4), 0.1);
  EXPECT_DOUBLE_EQ(floor(1000), 0.1) << "rises again";
  EXPECT_DOUBLE_EQ(lr::cosine_annealing_lr(4, 0.1)(8), 1) << "the twin rises again";
}

TEST(LRScheduler, SeveralOptimizersAreOneSchedule) {
  const auto first = make_optimizer({1}), second = make_optimizer({2, 4});
  LRScheduler scheduler({first.get(), second.get()}, lr::step_lr(2, 0.5));
  scheduler.step();
  scheduler.step();
  EXPECT_EQ(rates_of(*first), std::vector<double>{0.5});
  EXPECT_EQ(rates_of(*second), (std::vector<double>{1, 2}));
  EXPECT_EQ(scheduler.lr_at(5), (std::vector<double>{0.25, 0.5, 1}));
  EXPECT_EQ(scheduler.last_epoch(), 2);
  scheduler.set_last_epoch(6);
  EXPECT_EQ(rates_of(*second), (std::vector<double>{0.25, 0.5}));
}

TEST(LRScheduler, ABadStateChangesNothing) {
  const auto optimizer = make_optimizer({1, 2});
  LRScheduler scheduler(*optimizer, lr::step_lr(1, 0.5));
  scheduler.step();
  const auto refused = [&](const char* key, fsdp2::dcp::Value value, const char* text) {
    StateDict state = scheduler.state_dict();
    state[key] = std::move(value);
    EXPECT_FSDP2_ERROR(scheduler.load_state_dict(state), kInvalidArgument, text);
    EXPECT_EQ(rates_of(*optimizer), (std::vector<double>{0.5, 1})) << key;
    EXPECT_EQ(scheduler.last_epoch(), 1);
  };
  using Values = std::vector<fsdp2::dcp::Value>;
  refused("last_epoch", -1, "last_epoch is -1");
  refused("base_lrs", Values{1.0}, "1 base_lrs");
  refused("base_lrs", Values{1.0, std::nan("")}, "nan");
  refused("base_lrs", Values{1.0, -0.5}, "from 0 on");
  refused("base_lrs", 1.0, "Double");
  StateDict state = scheduler.state_dict();
  state.erase("last_epoch");
  EXPECT_FSDP2_ERROR(scheduler.load_state_dict(state), kNotFound, "last_epoch");

  optimizer->add_param_group(torch::optim::OptimizerParamGroup({torch::zeros({1}, torch::requires_grad())}));
  EXPECT_FSDP2_ERROR(scheduler.step(), kUsage, "3 groups");
}

TEST(LRScheduler, AnotherScheduleThanTheSavedOneIsSaid) {
  std::vector<std::string> lines;
  fsdp2::set_log_sink([&](fsdp2::LogLevel, const std::string& text) { lines.push_back(text); });
  const auto optimizer = make_optimizer({1});
  LRScheduler saved(*optimizer, lr::warmup_cosine(3, 10));
  saved.set_last_epoch(5);
  LRScheduler same(*optimizer, lr::warmup_cosine(3, 10)), other(*optimizer, lr::warmup_cosine(3, 20));
  same.load_state_dict(saved.state_dict());
  EXPECT_TRUE(lines.empty());
  other.load_state_dict(saved.state_dict());
  fsdp2::set_log_sink({});
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("step 5"), std::string::npos) << lines[0];
}

TEST(LRScheduler, WrongArgumentsAreNamed) {
  const auto optimizer = make_optimizer();
  EXPECT_FSDP2_ERROR(LRScheduler({nullptr}, lr::step_lr(1)), kInvalidArgument, "null");
  EXPECT_FSDP2_ERROR(LRScheduler(*optimizer, {}), kInvalidArgument, "empty");
  EXPECT_FSDP2_ERROR(LRScheduler(*optimizer, [](int64_t) { return -1.0; }), kInvalidArgument, "step 0");
  EXPECT_FSDP2_ERROR(lr::step_lr(0), kInvalidArgument, "step_size is 0");
  EXPECT_FSDP2_ERROR(lr::exponential_lr(std::nan("")), kInvalidArgument, "gamma");
  EXPECT_FSDP2_ERROR(lr::multi_step_lr({5, 3}), kInvalidArgument, "milestone 1 is 3");
  EXPECT_FSDP2_ERROR(lr::sequential_lr({lr::step_lr(1)}, {3}), kInvalidArgument, "1 milestones");
  EXPECT_FSDP2_ERROR(lr::chained_lr({}), kInvalidArgument, "chained_lr");
  EXPECT_FSDP2_ERROR(lr::warmup_cosine(10, 10), kInvalidArgument, "total_steps");
}

}  // namespace
