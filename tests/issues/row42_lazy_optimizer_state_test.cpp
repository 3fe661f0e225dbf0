// labels: ranks
// State of a parameter that had no gradient before the save: a strict load gives it default state with a note; state
// of which only a part was saved is an error that names the parameter and the field.

#include <fsdp2/fsdp2.h>
#include <fsdp2/log.h>
#include <torch/torch.h>

#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;

struct TwoImpl : torch::nn::Module {
  TwoImpl() {
    a = register_module("a", torch::nn::Linear(torch::nn::LinearOptions(3, 5).bias(false)));
    b = register_module("b", torch::nn::Linear(torch::nn::LinearOptions(3, 5).bias(false)));
  }
  torch::nn::Linear a = nullptr, b = nullptr;
};
TORCH_MODULE(Two);

Two make(bool sharded) {
  Two two;
  if (sharded) {
    fully_shard(two->a);
    fully_shard(two->b);
    fully_shard(two);
  }
  return two;
}

/// What Python saves when only `a` was used: there is no state of `b`.
dcp::StateDict only_a(Two& two, AdamW& optimizer) {
  fsdp2::call(two->a, torch::ones({2, 3})).sum().backward();
  optimizer.step();
  optimizer.zero_grad();
  dcp::StateDict state = get_optimizer_state_dict(two, optimizer);
  state["state"].dict().erase("b.weight");
  return state;
}

template <class Body>
std::string notes_of(Body body) {
  std::string notes;
  set_log_sink([&](LogLevel, const std::string& line) { notes += line + "\n"; });
  body();
  set_log_sink({});
  return notes;
}

TEST(Row42, StateThatWasNeverMadeThroughACheckpoint) {
  for (const bool sharded : {false, true}) {
    const TempDir folder;
    const std::string path = folder.path() + "/ckpt", damaged = folder.path() + "/damaged";
    ASSERT_TRUE(run_ranks(2, [&](int) {
      Two two = make(sharded);
      AdamW used(two->parameters(), AdamWOptions(0.1));
      dcp::StateDict state = only_a(two, used);
      dcp::save({{"optim", state}}, path);
      state["state"].dict()["a.weight"].dict().erase("exp_avg_sq");
      dcp::save({{"optim", state}}, damaged);

      // Into a fresh optimizer, and into one that has state of both.
      for (const bool fresh : {true, false}) {
        AdamW target(two->parameters(), AdamWOptions(0.9));
        if (!fresh) {
          fsdp2::call(two->b, fsdp2::call(two->a, torch::ones({2, 3})).narrow(1, 0, 3)).sum().backward();
          target.step();
          target.step();
          target.zero_grad();
          ASSERT_EQ(target.state().size(), 2u);
        }
        dcp::StateDict full{{"optim", get_optimizer_state_dict(two, target)}};
        dcp::LoadReport report;
        const std::string notes = notes_of([&] {
          report = dcp::load(full, path);  // strict
          set_optimizer_state_dict(two, target, full["optim"].dict());
        });
        EXPECT_EQ(report.missing, (std::vector<std::string>{"optim.state.b.weight.step", "optim.state.b.weight.exp_avg",
                                                            "optim.state.b.weight.exp_avg_sq"}));
        EXPECT_NE(notes.find("e.g. no optim.state.b.weight.step"), std::string::npos) << notes;
        const dcp::StateDict loaded = get_optimizer_state_dict(two, target);
        const dcp::StateDict& states = loaded.at("state").dict();
        EXPECT_EQ(states.at("a.weight").dict().at("step").tensor().item<float>(), 1);
        EXPECT_EQ(states.at("b.weight").dict().at("step").tensor().item<float>(), 0);
        EXPECT_EQ(states.at("b.weight").dict().at("exp_avg").tensor().abs().sum().item<float>(), 0);
        EXPECT_EQ(target.param_groups()[0].options().get_lr(), 0.1);
      }
      AdamW target(two->parameters(), AdamWOptions(0.9));
      dcp::StateDict full{{"optim", get_optimizer_state_dict(two, target)}};
      EXPECT_FSDP2_ERROR(dcp::load(full, damaged), kNotFound,
                         "has optim.state.a.weight.step but not optim.state.a.weight.exp_avg_sq");
    }));
  }
}

TEST(Row42, TheDictItself) {
  Two two = make(false);
  AdamW used(two->parameters(), AdamWOptions(0.1));
  dcp::StateDict state = only_a(two, used);
  AdamW target(two->parameters(), AdamWOptions(0.9));
  const std::string notes = notes_of([&] { set_optimizer_state_dict(two, target, state); });
  EXPECT_NE(notes.find("no optimizer state for 1 parameters, e.g. b.weight"), std::string::npos) << notes;
  EXPECT_EQ(target.state().size(), 1u);
  state["state"].dict()["a.weight"].dict().erase("step");
  EXPECT_FSDP2_ERROR(set_optimizer_state_dict(two, target, state), kNotFound,
                     "the optimizer state of a.weight has no step");
}

TEST(Row42, TheFlatForm) {
  const TempDir folder;
  const std::string path = folder.path() + "/ckpt";
  Two two = make(false);
  AdamW used(two->parameters(), AdamWOptions(0.1));
  only_a(two, used);
  const StateDictOptions flat{.flatten_optimizer_state_dict = true};
  dcp::StateDict state = get_optimizer_state_dict(two, used, flat);
  for (const std::string field : {"step", "exp_avg", "exp_avg_sq"}) state.erase("state.b.weight." + field);
  dcp::save({{"optim", state}}, path);
  AdamW target(two->parameters(), AdamWOptions(0.9));
  dcp::StateDict full{{"optim", get_optimizer_state_dict(two, target, flat)}};
  EXPECT_FSDP2_ERROR(dcp::load(full, path), kNotFound, "optim.state.b.weight.exp_avg");
  dcp::load(full, path, {.allow_missing = {"optim.state.b.*"}});
  set_optimizer_state_dict(two, target, full["optim"].dict());
  EXPECT_EQ(get_optimizer_state_dict(two, target, flat).at("state.b.weight.step").tensor().item<float>(), 0);
  EXPECT_EQ(target.param_groups()[0].options().get_lr(), 0.1);
}

}  // namespace
}  // namespace fsdp2::testing
