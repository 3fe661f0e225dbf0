// Parameter groups with different learning rates and an empty one come back from a checkpoint, also from one that
// lacks a hyper-parameter: each group gets its own values, and what is missing keeps the constructed one with a note.

#include <fsdp2/fsdp2.h>
#include <fsdp2/log.h>
#include <torch/torch.h>

#include <memory>

#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

AdamW make(std::vector<torch::Tensor> a, AdamWOptions first, std::vector<torch::Tensor> b, AdamWOptions second,
           AdamWOptions empty) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::move(a), std::make_unique<AdamWOptions>(first));
  groups.emplace_back(std::move(b), std::make_unique<AdamWOptions>(second));
  groups.emplace_back(std::vector<torch::Tensor>{}, std::make_unique<AdamWOptions>(empty));
  return AdamW(std::move(groups), AdamWOptions(0.5));
}

TEST(Row44, GroupsAndAMissingHyperParameterThroughACheckpoint) {
  const TempDir folder;
  const std::string path = folder.path() + "/ckpt";
  torch::nn::Linear net(3, 2);
  AdamW saved = make({net->weight}, AdamWOptions(0.1).betas({0.5, 0.6}), {net->bias},
                     AdamWOptions(0.2).betas({0.7, 0.8}), AdamWOptions(0.3));
  dcp::StateDict file{{"optim", get_optimizer_state_dict(net, saved)}};
  auto groups = file["optim"].dict()["param_groups"].list();
  for (dcp::Value& group : groups) {
    group.dict().erase("decoupled_weight_decay");  // older than that key
    group.dict().erase("eps");
  }
  file["optim"].dict()["param_groups"] = groups;
  dcp::save(file, path);

  // The groups in another order, constructed with other values.
  AdamW fresh = make({net->bias}, AdamWOptions(0.9).eps(1e-3), {net->weight}, AdamWOptions(0.9).eps(1e-4),
                     AdamWOptions(0.9).eps(1e-5));
  std::string notes;
  set_log_sink([&](LogLevel, const std::string& line) { notes += line + "\n"; });
  dcp::StateDict target{{"optim", get_optimizer_state_dict(net, fresh)}};
  const dcp::LoadReport report = dcp::load(target, path);  // strict
  set_optimizer_state_dict(net, fresh, target["optim"].dict());
  set_log_sink({});
  EXPECT_EQ(report.missing.size(), 6u);
  EXPECT_NE(notes.find("optim.param_groups.0.eps"), std::string::npos) << notes;

  const auto options = [&](size_t group) {
    return static_cast<const AdamWOptions&>(fresh.param_groups()[group].options());
  };
  EXPECT_EQ(options(0).lr(), 0.2);
  EXPECT_EQ(options(0).betas(), (std::tuple<double, double>(0.7, 0.8)));
  EXPECT_EQ(options(0).eps(), 1e-3);  // its own, although the file has this group in another place
  EXPECT_EQ(options(1).eps(), 1e-4);
  EXPECT_EQ(options(1).lr(), 0.1);
  EXPECT_EQ(options(1).betas(), (std::tuple<double, double>(0.5, 0.6)));
  EXPECT_EQ(options(2).lr(), 0.3);
  EXPECT_EQ(options(2).eps(), 1e-5);
}

TEST(Row44, WhatTheDictItselfLacksKeepsTheConstructedValue) {
  torch::nn::Linear net(3, 2);
  AdamW saved = make({net->weight}, AdamWOptions(0.1), {net->bias}, AdamWOptions(0.2), AdamWOptions(0.3));
  dcp::StateDict state = get_optimizer_state_dict(net, saved);
  auto groups = state["param_groups"].list();
  groups[1].dict().erase("eps");
  state["param_groups"] = groups;
  AdamW fresh =
      make({net->weight}, AdamWOptions(0.9).eps(1e-3), {net->bias}, AdamWOptions(0.9).eps(1e-4), AdamWOptions(0.9));
  set_optimizer_state_dict(net, fresh, state);
  EXPECT_EQ(static_cast<const AdamWOptions&>(fresh.param_groups()[0].options()).eps(), 1e-8);
  EXPECT_EQ(static_cast<const AdamWOptions&>(fresh.param_groups()[1].options()).eps(), 1e-4);
  EXPECT_EQ(fresh.param_groups()[1].options().get_lr(), 0.2);
}

}  // namespace
}  // namespace fsdp2::testing
