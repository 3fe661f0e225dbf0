// labels: peer
// timeout: 600
// Order of events, number and bytes of collectives, and whole parameters alive equal those of Python's FSDP2, which
// runs in this test.

#include <fsdp2/detail/trace.h>

#include <algorithm>
#include <fstream>
#include <map>

#include <nlohmann/json.hpp>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using fsdp2::testing::run_ranks;
using nlohmann::json;
using torch::Tensor;
using Names = std::vector<std::vector<std::string>>;

// ---- The model of events_peer.py

struct UnitImpl : torch::nn::Module {
  explicit UnitImpl(int64_t dim) {
    up = register_module("up", torch::nn::Linear(dim, 2 * dim));
    down = register_module("down", torch::nn::Linear(2 * dim, dim));
  }
  Tensor forward(const Tensor& x) { return x + down(torch::tanh(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
FSDP2_MODULE(Unit);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const json& spec) : path(spec["path"].get<Names>()) {
    const int64_t dim = spec["dim"];
    scale = register_parameter("scale", torch::zeros({dim}));
    for (const char* name : {"stem", "block0", "block1", "block2", "norm", "head"}) {
      units.emplace(name, register_module(name, Unit(dim)));
    }
    torch::NoGradGuard no_grad;
    int i = 0;
    for (Tensor& param : parameters()) {
      param.copy_((torch::sin(torch::arange(param.numel(), torch::kFloat) * 0.7 + i++) * 0.3).view_as(param));
    }
  }
  std::vector<Tensor> forward(const Tensor& x) {
    std::vector<Tensor> branches, outs;
    for (const auto& names : path) {
      Tensor y = x;
      for (const std::string& name : names) y = name == "shared" ? branches[0] : units.at(name)(y);
      branches.push_back(y);
    }
    // The first of several paths only feeds the others, which name it "shared".
    for (size_t i = branches.size() > 1 ? 1 : 0; i < branches.size(); ++i) outs.push_back(branches[i] * scale);
    return outs;
  }
  Names path;
  Tensor scale;
  std::map<std::string, Unit> units;
};
FSDP2_MODULE(Net);

Tensor inputs(const json& spec, int step, int micro, int forward, int rank) {
  const int64_t dim = spec["dim"];
  const Tensor count = torch::arange(2 * dim, torch::kDouble);
  const Tensor x = torch::sin(0.1 * (count + 7 * rank + 3 * step + 5 * micro + 11 * forward));
  return x.to(torch::kFloat).view({2, dim}).requires_grad_(spec["input_grad"].get<bool>());
}

fsdp2::FSDPModule shard(Net& model, const json& spec) {
  fsdp2::FullyShardOptions options;
  const std::vector<int64_t> shape = spec["mesh"];
  std::vector<std::string> names{"replicate", "shard"};
  if (shape.size() == 1) names.erase(names.begin());
  options.mesh = fsdp2::init_device_mesh(torch::kCPU, shape, names);
  const json& reshard = spec["reshard_after_forward"];
  if (reshard.is_boolean()) options.reshard_after_forward = reshard.get<bool>();
  if (reshard.is_number()) options.reshard_after_forward = reshard.get<int>();
  std::vector<fsdp2::FSDPModule> units;
  for (const std::vector<std::string> unit : spec["units"]) {
    std::vector<fsdp2::ModuleRef> modules;
    for (const std::string& name : unit) modules.emplace_back(model->units.at(name));
    units.push_back(modules.size() > 1 ? fsdp2::fully_shard(modules, options)
                                       : fsdp2::fully_shard(model->units.at(unit[0]), options));
  }
  const auto root = fsdp2::fully_shard(model, options);
  const auto slice = [&](size_t begin, size_t end) {
    return std::vector<fsdp2::FSDPModule>(units.begin() + begin, units.begin() + std::min(end, units.size()));
  };
  for (size_t i = 0; i < units.size(); ++i) {
    if (const size_t depth = spec["forward_prefetch"]; depth > 0) {
      units[i].set_modules_to_forward_prefetch(slice(i + 1, i + 1 + depth));
    }
    if (const size_t depth = spec["backward_prefetch"]; depth > 0) {
      auto before = slice(i < depth ? 0 : i - depth, i);
      std::reverse(before.begin(), before.end());
      units[i].set_modules_to_backward_prefetch(before);
    }
  }
  return root;
}

struct Step {
  std::vector<std::string> events;
  fsdp2::Counters counters;
  std::vector<double> losses;
};

std::vector<Step> run(const json& spec, int rank) {
  std::vector<std::string> events;
  Net model(spec);
  auto root = shard(model, spec);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  std::vector<Step> steps;
  for (int step = 0; step < spec["steps"]; ++step) {
    events.clear();
    fsdp2::reset_counters();
    const int64_t before = fsdp2::counters().unsharded_bytes;  // nothing of an earlier case may be left
    fsdp2::detail::set_trace([&](const char* event, const std::string& module) {
      events.push_back(c10::str(event, " '", module, "' ", fsdp2::counters().unsharded_bytes - before));
    });
    std::vector<double> losses;
    int micro = 0;
    for (const json& flags : spec["micros"]) {
      root.set_requires_gradient_sync(flags["sync"]);
      root.set_requires_all_reduce(flags["all_reduce"]);
      root.set_reshard_after_backward(flags["reshard"]);
      if (spec["eval_first"]) {
        torch::NoGradGuard no_grad;
        model(inputs(spec, step, micro, 9, rank));
      }
      std::vector<Tensor> outs;
      for (int forward = 0; forward < spec["forwards"]; ++forward) {
        for (const Tensor& out : model(inputs(spec, step, micro, forward, rank))) outs.push_back(out.square().sum());
      }
      if (spec["backward_each"]) {
        for (size_t i = 0; i < outs.size(); ++i) {
          root.set_is_last_backward(i + 1 == outs.size());
          outs[i].backward({}, /*retain_graph=*/i + 1 < outs.size());
          losses.push_back(outs[i].item<double>());
        }
      } else {
        Tensor loss = outs[0];
        for (size_t i = 1; i < outs.size(); ++i) loss = loss + outs[i];
        loss.backward();
        losses.push_back(loss.item<double>());
      }
      ++micro;
    }
    fsdp2::detail::set_trace({});
    steps.push_back({events, fsdp2::counters(), losses});
    optimizer.step();
    if (spec["post_optim_event"]) root.set_post_optim_event(std::make_shared<c10::Event>(c10::DeviceType::CPU));
    optimizer.zero_grad();
  }
  return steps;
}

// ---- Cases

json micro(bool sync, bool all_reduce = true, bool reshard = true) {
  return {{"sync", sync}, {"all_reduce", all_reduce}, {"reshard", reshard}};
}

const Names kBlocks = {{"block0"}, {"block1"}, {"block2"}};

json base_case(std::vector<int64_t> mesh) {
  return {{"dim", 8},
          {"mesh", mesh},
          {"reshard_after_forward", nullptr},
          {"units", kBlocks},
          {"path", Names{{"stem", "block0", "block1", "block2", "head"}}},
          {"forward_prefetch", 0},
          {"backward_prefetch", 0},
          {"micros", json::array({micro(true)})},
          {"forwards", 1},
          {"backward_each", false},
          {"input_grad", false},
          {"eval_first", false},
          {"post_optim_event", false},
          {"steps", 2}};
}

json with(json spec, const json& changes) {
  spec.update(changes);
  return spec;
}

const Names kLists = {{"block0", "stem"}, {"block1"}, {"block2"}, {"norm", "head"}};
const Names kListsPath = {{"stem", "block0", "block1", "block2", "norm", "head"}};
const Names kBranches = {{"stem", "block0"}, {"shared", "block1"}, {"shared", "block2"}};

json cases_on_two_ranks() {
  const json base = base_case({2});
  json cases;
  cases["plain"] = base;
  cases["input needs a gradient"] = with(base, {{"input_grad", true}});
  cases["first block has a plain input"] = with(base, {{"path", Names{{"block0", "block1", "block2", "head"}}}});
  cases["unused block"] = with(base, {{"path", Names{{"stem", "block0", "block2", "head"}}}});
  cases["block used twice"] = with(base, {{"path", Names{{"stem", "block0", "block1", "block1", "block2", "head"}}}});
  for (const int depth : {1, 2}) {
    const std::string name = " prefetch depth " + std::to_string(depth);
    cases["forward" + name] = with(base, {{"forward_prefetch", depth}});
    cases["backward" + name] = with(base, {{"backward_prefetch", depth}});
    cases["both" + name] =
        with(base, {{"forward_prefetch", depth}, {"backward_prefetch", depth}, {"input_grad", true}});
  }
  cases["accumulate, sync each"] = with(base, {{"micros", {micro(true), micro(true)}}});
  cases["accumulate, no sync"] = with(base, {{"micros", {micro(false), micro(false), micro(true)}}});
  cases["accumulate, no sync, kept whole"] =
      with(base, {{"micros", {micro(false, true, false), micro(false, true, false), micro(true)}}});
  for (const json& reshard : json::array({nullptr, true, false})) {
    const json changed = with(base, {{"reshard_after_forward", reshard}});
    const std::string name = ", reshard " + reshard.dump();
    cases["two forwards, one backward" + name] = with(changed, {{"forwards", 2}});
    cases["two forwards, two backwards" + name] = with(changed, {{"forwards", 2}, {"backward_each", true}});
    cases["two branches, a backward for each" + name] = with(changed, {{"path", kBranches}, {"backward_each", true}});
    if (reshard.is_null()) continue;
    cases["reshard " + reshard.dump()] = changed;
    cases["prefetch both ways" + name] = with(changed, {{"forward_prefetch", 1}, {"backward_prefetch", 2}});
  }
  cases["a forward without gradients before"] = with(base, {{"eval_first", true}});
  cases["an event after each step of the optimizer"] = with(base, {{"post_optim_event", true}});
  cases["lists"] = with(base, {{"units", kLists}, {"path", kListsPath}});
  cases["lists, reshard true"] =
      with(base, {{"units", kLists}, {"path", kListsPath}, {"reshard_after_forward", true}, {"input_grad", true}});
  cases["lists, prefetch"] =
      with(base, {{"units", kLists}, {"path", kListsPath}, {"forward_prefetch", 1}, {"backward_prefetch", 1}});
  return cases;
}

json cases_on_four_ranks() {
  const json base = base_case({4}), hsdp = base_case({2, 2});
  json cases;
  cases["plain"] = base;
  cases["reshard to two ranks"] = with(base, {{"reshard_after_forward", 2}});
  cases["reshard to two ranks, no sync"] =
      with(base, {{"reshard_after_forward", 2}, {"micros", {micro(false), micro(true)}}});
  cases["reshard to two ranks, prefetch"] =
      with(base, {{"reshard_after_forward", 2}, {"forward_prefetch", 1}, {"backward_prefetch", 2}});
  cases["hsdp"] = hsdp;
  cases["hsdp, reshard false"] = with(hsdp, {{"reshard_after_forward", false}, {"input_grad", true}});
  cases["hsdp, no sync"] = with(hsdp, {{"micros", {micro(false), micro(false), micro(true)}}});
  cases["hsdp, no all-reduce"] = with(hsdp, {{"micros", {micro(true, false), micro(true, false), micro(true)}}});
  cases["hsdp, no all-reduce, kept whole"] = with(hsdp, {{"micros", {micro(true, false, false), micro(true)}}});
  cases["hsdp, prefetch"] = with(hsdp, {{"forward_prefetch", 2}, {"backward_prefetch", 1}});
  cases["hsdp, lists"] = with(hsdp, {{"units", kLists}, {"path", kListsPath}});
  return cases;
}

// ---- Comparison

std::string lines(const std::vector<std::string>& events) {
  std::string text;
  for (const std::string& event : events) text += event + "\n";
  return text;
}

void expect_equal(const Step& ours, const json& peer, const std::string& at) {
  EXPECT_EQ(lines(ours.events), lines(peer["events"].get<std::vector<std::string>>())) << at;
  const json& counts = peer["counts"];
  EXPECT_EQ(ours.counters.all_gathers, counts["all_gathers"].get<int64_t>()) << at;
  EXPECT_EQ(ours.counters.reduce_scatters, counts["reduce_scatters"].get<int64_t>()) << at;
  EXPECT_EQ(ours.counters.all_reduces, counts["all_reduces"].get<int64_t>()) << at;
  EXPECT_EQ(ours.counters.bytes, counts["bytes"].get<int64_t>()) << at;
  // That both trained the same.
  ASSERT_EQ(ours.losses.size(), peer["losses"].size()) << at;
  for (size_t i = 0; i < ours.losses.size(); ++i) {
    EXPECT_NEAR(ours.losses[i], peer["losses"][i].get<double>(), 1e-4 * std::abs(ours.losses[i])) << at;
  }
}

void compare_with_python(int num_ranks, const json& cases) {
  const fsdp2::testing::TempDir folder;
  const std::string cases_file = folder.path() + "/cases.json", results_file = folder.path() + "/results.json";
  std::ofstream(cases_file) << cases;
  const auto python = fsdp2::testing::run_python_ranks(num_ranks, fsdp2::testing::test_file("peer/events_peer.py"),
                                                       {cases_file, results_file}, std::chrono::seconds(240));
  ASSERT_EQ(python.exit_code, 0) << python.output;
  const json expected = json::parse(std::ifstream(results_file));
  ASSERT_TRUE(run_ranks(
      num_ranks,
      [&](int rank) {
        for (const auto& [name, spec] : cases.items()) {
          const std::vector<Step> steps = run(spec, rank);
          ASSERT_EQ(steps.size(), expected[name].size());
          for (size_t i = 0; i < steps.size() && rank == 0; ++i) {  // the peer wrote those of its rank 0
            expect_equal(steps[i], expected[name][i], name + ", step " + std::to_string(i));
          }
        }
      },
      {.timeout = std::chrono::seconds(180)}));
}

TEST(EventsPeer, TwoRanks) { compare_with_python(2, cases_on_two_ranks()); }
TEST(EventsPeer, FourRanks) { compare_with_python(4, cases_on_four_ranks()); }

}  // namespace
