// labels: ranks
// torchtitan#275, Lightning#4655, pytorch#29697 and their likes: after a resume the learning rate starts again, lags a
// step, or is the one that the scheduler's constructor wrote over the loaded one. Warm-up 3, cosine 10, resumed after
// step 4 with every order of making and loading.

#include <cmath>
#include <numbers>

#include <torch/torch.h>

#include <fsdp2/fsdp2.h>

#include "support/ranks.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::LRScheduler;
using fsdp2::dcp::StateDict;

constexpr double kBase = 0.8;
constexpr int kSteps = 13, kSavedAt = 4;

struct Run {
  torch::nn::Linear model{3, 2};
  torch::optim::Adam optimizer{model->parameters(), torch::optim::AdamOptions(kBase)};
  std::shared_ptr<LRScheduler> scheduler;
  std::vector<double> rates;  // with which a step was taken

  void make_scheduler() {
    scheduler = std::make_shared<LRScheduler>(optimizer, fsdp2::lr_schedule::warmup_cosine(3, 13));
  }
  void train(int steps) {
    for (int i = 0; i < steps; ++i) {
      optimizer.zero_grad();
      model(torch::ones({2, 3})).sum().backward();
      rates.push_back(optimizer.param_groups()[0].options().get_lr());
      optimizer.step();
      scheduler->step();
    }
  }
  void load_optimizer(const std::string& path) {
    StateDict state{{"optim", fsdp2::get_optimizer_state_dict(model, optimizer)}};
    fsdp2::dcp::load(state, path);
    fsdp2::set_optimizer_state_dict(model, optimizer, state["optim"].dict());
  }
  void load_scheduler(const std::string& path) {
    StateDict state{{"lr", scheduler}};
    fsdp2::dcp::load(state, path);
  }
};

RANKS_TEST(Row50, EveryOrderOfMakingAndLoadingGoesOnWithTheSameRates, 1) {
  std::vector<double> expected;  // by hand: 1/4, 2/4, 3/4, then half a cosine over 10 steps
  for (int i = 0; i < kSteps; ++i)
    expected.push_back(kBase * (i < 3 ? (i + 1) / 4.0 : (1 + std::cos(std::numbers::pi * (i - 3) / 10)) / 2));

  const TempDir folder;
  const std::string path = folder.path() + "/ckpt";
  Run first;
  first.make_scheduler();
  first.train(kSavedAt);
  fsdp2::dcp::save({{"optim", fsdp2::get_optimizer_state_dict(first.model, first.optimizer)}, {"lr", first.scheduler}},
                   path);
  first.train(kSteps - kSavedAt);
  ASSERT_EQ(first.rates.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(first.rates[i], expected[i], 1e-15) << i;

  for (int order = 0; order < 3; ++order) {
    Run resumed;
    if (order != 1) resumed.make_scheduler();
    if (order != 2) resumed.load_optimizer(path);
    if (order == 1) resumed.make_scheduler();
    resumed.load_scheduler(path);
    if (order == 2) resumed.load_optimizer(path);
    EXPECT_EQ(resumed.scheduler->last_epoch(), kSavedAt);
    resumed.train(kSteps - kSavedAt);
    for (size_t i = 0; i < resumed.rates.size(); ++i)
      EXPECT_EQ(resumed.rates[i], first.rates[i + kSavedAt]) << "order " << order << ", step " << i + kSavedAt;
  }
}

}  // namespace
