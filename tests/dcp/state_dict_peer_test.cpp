// labels: peer, ranks
// timeout: 600
// Whole, flat and numbered state dicts, both ways with Python; optimizer state that Python never made.

#include <fsdp2/fsdp2.h>
#include <fsdp2/log.h>
#include <torch/torch.h>

#include <algorithm>

#include "dcp/same.h"
#include "dcp/state_models.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

using dcp::StateDict;
using dcp::Value;

Layout layout_of(int world) { return world == 4 ? Layout::kHybrid : Layout::kSharded; }

void save_ours(const std::string& folder, int world) {
  RuleTraining run(layout_of(world));
  const auto [model, optim] = get_state_dict(run.net, *run.optimizer, {.full_state_dict = true, .cpu_offload = true});
  StateDict full;
  if (!model.empty()) full = {{"model", model}, {"optim", optim}};
  dcp::save(full, folder + "/cpp_full_" + std::to_string(world));
  const StateDict flat = get_optimizer_state_dict(run.net, *run.optimizer, {.flatten_optimizer_state_dict = true});
  dcp::save({{"optim", flat}}, folder + "/cpp_flat_" + std::to_string(world));
}

std::vector<std::string> texts(const Value& list) {
  std::vector<std::string> result;
  for (const Value& item : list.list()) result.push_back(item.str());
  return result;
}
std::vector<std::string> sorted(std::vector<std::string> keys) {
  std::sort(keys.begin(), keys.end());
  return keys;
}

void check_full(const std::string& path, int rank, const std::string& where) {
  const StateDictOptions from_rank0{.full_state_dict = true, .broadcast_from_rank0 = true};
  RuleTraining run(layout_of(get_world_size()), RuleTraining::Fresh{true});
  StateDict saved{{"model", StateDict()}, {"optim", StateDict()}};
  if (rank == 0) saved = dcp::Reader(path).read_all();
  set_state_dict(run.net, *run.optimizer, saved["model"].dict(), saved["optim"].dict(), from_rank0);
  expect_model(run.net, rule_model(), where);
  expect_optimizer(run.net, *run.optimizer, rule_optimizer(), where);
  // Our dict has Python's keys.
  const auto [model, optim] = get_state_dict(run.net, *run.optimizer, {.full_state_dict = true, .cpu_offload = true});
  if (rank != 0) return;
  EXPECT_EQ(sorted(model.keys()), sorted(texts(saved["model_keys"]))) << where;
  std::vector<std::string> state_keys;
  for (const auto& [fqn, entry] : optim.at("state").dict()) {
    for (const auto& [field, value] : entry.dict()) state_keys.push_back(fqn + "." + field);
  }
  EXPECT_EQ(sorted(state_keys), sorted(texts(saved["state_keys"]))) << where;
  EXPECT_EQ(sorted(optim.at("param_groups").list()[0].dict().keys()), sorted(texts(saved["group_keys"]))) << where;
}

void check_flat(const std::string& path, const std::string& where) {
  RuleTraining run(layout_of(get_world_size()), RuleTraining::Fresh{});
  StateDict state{{"optim", get_optimizer_state_dict(run.net, *run.optimizer, {.flatten_optimizer_state_dict = true})},
                  {"keys", nullptr}};
  const std::vector<std::string> ours = state["optim"].dict().keys();
  dcp::load(state, path);  // strict
  EXPECT_EQ(sorted(ours), sorted(texts(state["keys"]))) << where;
  set_optimizer_state_dict(run.net, *run.optimizer, state["optim"].dict());
  expect_optimizer(run.net, *run.optimizer, rule_optimizer(), where);
}

/// Of torch.optim's own dict, read whole.
void check_number(const std::string& path, const std::string& where) {
  RuleTraining run(layout_of(get_world_size()), RuleTraining::Fresh{});
  const StateDict state = dcp::Reader(path).read_all();
  set_optimizer_state_dict(run.net, *run.optimizer, state.at("optim").dict(), {.full_state_dict = true});
  expect_optimizer(run.net, *run.optimizer, rule_optimizer(), where);
}

void check_nested(const std::string& path, const std::string& where) {
  RuleTraining run(layout_of(get_world_size()), RuleTraining::Fresh{true});
  StateDict state{{"model", get_model_state_dict(run.net)},
                  {"optim", get_optimizer_state_dict(run.net, *run.optimizer)}};
  dcp::load(state, path);
  set_state_dict(run.net, *run.optimizer, state["model"].dict(), state["optim"].dict());
  expect_model(run.net, rule_model(), where);
  expect_optimizer(run.net, *run.optimizer, rule_optimizer(), where);
}

/// A strict load of state that Python's optimizer did not have yet.
void check_lazy(const std::string& path) {
  RuleTraining run(Layout::kSharded, 0);
  StateDict state{{"optim", get_optimizer_state_dict(run.net, *run.optimizer)}};
  std::string notes;
  set_log_sink([&](LogLevel, const std::string& line) { notes += line; });
  const dcp::LoadReport report = dcp::load(state, path);
  set_optimizer_state_dict(run.net, *run.optimizer, state["optim"].dict());
  set_log_sink({});
  EXPECT_EQ(report.missing.size(), 6u);  // step and two moments of one_row and down.weight
  EXPECT_NE(notes.find("has no state of 2 parameters, e.g. no optim.state.one_row.step"), std::string::npos) << notes;
  EXPECT_EQ(run.optimizer->state().size(), 2u);
  const StateDict loaded = get_optimizer_state_dict(run.net, *run.optimizer);
  EXPECT_EQ(loaded.at("state").dict().at("up.bias").dict().at("step").tensor().item<float>(), 1);
  EXPECT_EQ(loaded.at("state").dict().at("one_row").dict().at("step").tensor().item<float>(), 0);
}

TEST(StateDictPeer, WholeFlatAndNumberedBothWays) {
  const TempDir folder;
  for (const int world : {1, 2, 3, 4}) {
    ASSERT_TRUE(run_ranks(world, [&](int) { save_ours(folder.path(), world); }));
  }
  const ProcessResult python = run_python(test_file("peer/state_dicts.py"), {folder.path()}, std::chrono::seconds(400));
  ASSERT_EQ(python.exit_code, 0) << python.output;
  for (const int world : {1, 2, 3, 4}) {
    ASSERT_TRUE(run_ranks(world, [&](int rank) {
      for (const int saved : {1, 2, 3, 4}) {
        const std::string suffix = "_" + std::to_string(saved), where = suffix + " on " + std::to_string(world);
        check_full(folder.path() + "/py_full" + suffix, rank, "full" + where);
        check_flat(folder.path() + "/py_flat" + suffix, "flat" + where);
        check_number(folder.path() + "/py_number" + suffix, "number" + where);
        check_nested(folder.path() + "/py_nested" + suffix, "nested" + where);
      }
      check_lazy(folder.path() + "/py_lazy");
    }));
  }
}

}  // namespace
}  // namespace fsdp2::testing
