// labels: ranks
// What diagnose() finds in a program with one fault, and that it is silent about the same program without it.

#include <filesystem>
#include <fstream>
#include <set>

#include "fsdp/models.h"
#include "support/ranks.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::DiagnoseOptions;
using fsdp2::Diagnosis;
using fsdp2::Finding;
using fsdp2::Severity;
using torch::Tensor;

/// The models are small: every group counts as large enough, unless a test is about that.
Diagnosis look(fsdp2::ModuleRef model, torch::optim::Optimizer* optimizer = nullptr, DiagnoseOptions options = {}) {
  if (!options.small_group_bytes) options.small_group_bytes = 1;
  return fsdp2::diagnose(model, optimizer, options);
}

Finding only(const Diagnosis& found, const std::string& rule) {
  const Finding* first = nullptr;
  for (const Finding& each : found) {
    if (each.rule == rule) {
      EXPECT_EQ(first, nullptr) << "twice:\n" << found.to_table();
      first = &each;
    }
  }
  EXPECT_NE(first, nullptr) << rule << " is not in:\n" << found.to_table();
  return first != nullptr ? *first : Finding();
}

#define EXPECT_CLEAN(diagnosis)                   \
  do {                                            \
    const Diagnosis each = (diagnosis);           \
    EXPECT_TRUE(each.empty()) << each.to_table(); \
  } while (false)

Tensor tokens() { return torch::arange(8).view({2, 4}); }

void step(Net& net, torch::optim::Optimizer& optimizer) {
  loss_of(net, tokens()).backward();
  optimizer.step();
}

torch::optim::AdamW adamw(Net& net) { return torch::optim::AdamW(net->parameters(), 1e-2); }

RANKS_TEST(DiagnoseRules, ARightProgramHasNoFinding, 2) {
  Net net = shard(Net(3));
  EXPECT_CLEAN(look(net));  // before the first step
  auto optimizer = adamw(net);
  for (int i = 0; i < 2; ++i) step(net, optimizer);
  EXPECT_CLEAN(look(net, &optimizer));
  optimizer.zero_grad();
  {
    const torch::NoGradGuard evaluation;
    net(tokens());
  }  // leaves the root whole
  EXPECT_CLEAN(look(net, &optimizer));
  EXPECT_EQ(look(net).to_table(), "fsdp2 diagnose: nothing found\n");
}

RANKS_TEST(DiagnoseRules, AForwardThatWasRefused, 2) {
  Net net = shard(Net(2));
  EXPECT_THROW(net->forward(tokens()), fsdp2::Error);
  const Diagnosis found = look(net);
  EXPECT_EQ(only(found, "forward-refused").where, "embed.weight");
  EXPECT_EQ(only(found, "forward-refused").severity, Severity::kError);
  Net other = shard(Net(2));  // mended, and beside the one that was refused
  other(tokens());
  EXPECT_CLEAN(look(other));
}

struct WithSpareImpl : torch::nn::Module {
  WithSpareImpl() {
    used = register_module("used", linear(4, 4));
    spare = register_module("spare", linear(4, 4));
  }
  Tensor forward(const Tensor& x) { return with_spare ? spare(used(x)) : used(x); }
  bool with_spare = false;
  Linear used{nullptr}, spare{nullptr};
};
FSDP2_MODULE(WithSpare);

RANKS_TEST(DiagnoseRules, AModuleWhoseHooksNeverRan, 2) {
  WithSpare model;
  fsdp2::fully_shard(model->used);
  auto handle = fsdp2::fully_shard(model->spare);
  fsdp2::fully_shard(model);
  model(torch::ones({1, 4})).sum().backward();
  EXPECT_EQ(only(look(model), "forward-not-hooked").where, "spare");
  EXPECT_EQ(only(look(model), "forward-not-hooked").severity, Severity::kWarning);
  handle.unshard();
  model->spare->forward(torch::ones({1, 4})).sum().backward();  // past the hooks, on whole parameters
  EXPECT_EQ(only(look(model), "forward-not-hooked").severity, Severity::kError);
  model->with_spare = true;
  model(torch::ones({1, 4})).sum().backward();
  EXPECT_CLEAN(look(model));
}

RANKS_TEST(DiagnoseRules, OneGroupForAll, 2) {
  Net net(3);
  fsdp2::fully_shard(net);
  const Diagnosis found = look(net);
  EXPECT_EQ(only(found, "only-root-sharded").where, "");
  EXPECT_NE(only(found, "only-root-sharded").fix.find("block0, block1, block2"), std::string::npos);
  // Smaller than what a collective costs anyway: one group is right.
  EXPECT_CLEAN(fsdp2::diagnose(net));
}

RANKS_TEST(DiagnoseRules, OneGroupForMost, 2) {
  Net net(4);
  fsdp2::fully_shard(net->blocks[0]);
  fsdp2::fully_shard(net);
  const Diagnosis found = look(net);
  // 66 elements of embed, 66 of head, 187 of each block (13 x 6 + 13 + 6 x 13 + 6 + 2 x 6): 693 of 880.
  EXPECT_NE(only(found, "dominant-group").what.find("78 %"), std::string::npos) << found.to_table();
  EXPECT_CLEAN(look(shard(Net(4))));
}

RANKS_TEST(DiagnoseRules, TheRootBeforeItsBlocks, 2) {
  Net net(2);
  fsdp2::fully_shard(net);
  EXPECT_THROW(fsdp2::fully_shard(net->blocks[1]), fsdp2::Error);
  EXPECT_EQ(only(look(net), "root-sharded-first").where, "block1");
  EXPECT_FALSE(look(shard(Net(2))).has("root-sharded-first"));
}

RANKS_TEST(DiagnoseRules, ParametersThatNobodySharded, 2) {
  Net net(2);
  EXPECT_EQ(only(look(net), "nothing-sharded").severity, Severity::kWarning);
  for (Block& block : net->blocks) fsdp2::fully_shard(block);
  const Finding finding = only(look(net), "parameter-not-sharded");
  EXPECT_NE(finding.what.find("embed.weight, head.weight"), std::string::npos) << finding.what;
  fsdp2::fully_shard(net);
  EXPECT_CLEAN(look(net));
}

RANKS_TEST(DiagnoseRules, SmallGroups, 2) {
  Net net(2);
  for (Block& block : net->blocks) {
    for (const auto& layer : {block->up, block->down}) fsdp2::fully_shard(layer);
    fsdp2::fully_shard(block);
  }
  fsdp2::fully_shard(net);
  // A layer has 13 x 6 + 13 or 6 x 13 + 6 elements, at most 364 bytes, and what is left of a block 48.
  const Diagnosis found = look(net, nullptr, {.small_group_bytes = 400});
  EXPECT_EQ(only(found, "small-groups").severity, Severity::kNote);
  EXPECT_EQ(only(found, "small-groups").what.substr(0, 35), "6 groups have at most 364 bytes (sm");
  EXPECT_FALSE(look(shard(Net(2)), nullptr, {.small_group_bytes = 400}).has("small-groups"));
}

RANKS_TEST(DiagnoseRules, SmallFrozenGroups, 2) {
  const auto build = [](bool frozen, bool kept) {
    Net net(2, 32);
    Linear extra = linear(4, 4);
    net->register_module("extra", extra);
    if (frozen) extra->weight.set_requires_grad(false);
    const auto handle = fsdp2::fully_shard(extra);
    shard(net);
    if (kept) {
      fsdp2::FSDPModule(handle).set_reshard_after_forward(false);
      fsdp2::FSDPModule(handle).set_reshard_after_backward(false);
    }
    return net;
  };
  EXPECT_EQ(only(look(build(true, false)), "frozen-gathered").where, "extra");
  EXPECT_CLEAN(look(build(true, true)));
  EXPECT_CLEAN(look(build(false, false)));
  // Most of the model is frozen, as with adapters: sharding it is the point.
  Net adapters(2);
  for (Tensor param : adapters->blocks[0]->parameters()) param.set_requires_grad(false);
  EXPECT_CLEAN(look(shard(adapters)));
}

RANKS_TEST(DiagnoseRules, ReshardThatCannotPay, 2) {
  const auto build = [](const fsdp2::FullyShardOptions& blocks, const fsdp2::FullyShardOptions& root) {
    Net net(2);
    for (Block& block : net->blocks) fsdp2::fully_shard(block, blocks);
    fsdp2::fully_shard(net, root);
    net(tokens());
    return net;
  };
  const auto what = [&](Net net) { return only(look(net), "reshard-cannot-pay").what; };
  EXPECT_NE(what(build({}, {.reshard_after_forward = true})).find("true on the root"), std::string::npos);
  EXPECT_NE(what(build({.reshard_after_forward = 1}, {})).find("= 1 keeps whole"), std::string::npos);
  EXPECT_NE(what(build({.reshard_after_forward = 2}, {})).find("is the shard size"), std::string::npos);
  const auto replicas = fsdp2::init_device_mesh(torch::kCPU, {2, 1}, {"replicate", "shard"});
  torch::manual_seed(0);
  EXPECT_NE(what(build({.mesh = replicas, .reshard_after_forward = true}, {.mesh = replicas})).find("all replicas"),
            std::string::npos);
  EXPECT_CLEAN(look(build({.reshard_after_forward = true}, {})));
  EXPECT_CLEAN(look(build({.reshard_after_forward = false}, {.reshard_after_forward = false})));
}

RANKS_TEST(DiagnoseRules, MixedPrecisionThatDoesNothing, 2) {
  using fsdp2::MixedPrecisionPolicy;
  const auto build = [](const MixedPrecisionPolicy& policy, at::ScalarType dtype = torch::kFloat) {
    Net net(2);
    net->to(dtype);
    return shard(net, {.mp_policy = policy});
  };
  const auto what = [&](Net net) { return only(look(net), "mixed-precision-no-effect").what; };
  EXPECT_NE(what(build({.param_dtype = torch::kBFloat16}, torch::kBFloat16)).find("param_dtype"), std::string::npos);
  EXPECT_NE(what(build({.reduce_dtype = torch::kFloat})).find("reduce_dtype is Float"), std::string::npos);
  EXPECT_NE(what(build({.buffer_dtype = torch::kBFloat16})).find("buffer_dtype"), std::string::npos);
  EXPECT_CLEAN(look(build({.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat})));
  EXPECT_CLEAN(look(build({.reduce_dtype = torch::kFloat}, torch::kBFloat16)));
}

RANKS_TEST(DiagnoseRules, OptimizersOfOtherParameters, 2) {
  Net net(2), copy(2);
  torch::optim::AdamW of_copy(copy->parameters());  // before sharding: the copy's are plain
  shard(net);
  const Diagnosis found = look(net, &of_copy);
  EXPECT_NE(only(found, "optimizer-foreign-parameter").what.find("one of shape [11, 6]"), std::string::npos);
  EXPECT_EQ(only(found, "optimizer-missing-parameter").severity, Severity::kWarning);
  torch::optim::AdamW head({net->head->weight});
  EXPECT_EQ(only(look(net, &head), "optimizer-missing-parameter").where, "embed.weight");
  std::vector<Tensor> rest;
  for (const auto& named : net->named_parameters()) {
    if (named.key() != "head.weight") rest.push_back(named.value());
  }
  torch::optim::SGD others(rest, 0.1);
  EXPECT_CLEAN(fsdp2::diagnose(net, {&head, &others}, {.small_group_bytes = 1}));
}

RANKS_TEST(DiagnoseRules, StateFromBeforeSharding, 2) {
  Net net(2);
  auto optimizer = adamw(net);
  loss_of(net, tokens()).backward();
  optimizer.step();
  optimizer.zero_grad();
  shard(net);
  const Finding finding = only(look(net, &optimizer), "optimizer-state-layout");
  EXPECT_EQ(finding.where, "embed.weight");
  EXPECT_NE(finding.what.find("exp_avg is a plain tensor [11, 6]"), std::string::npos) << finding.what;
  auto mended = adamw(net);
  step(net, mended);
  EXPECT_CLEAN(look(net, &mended));
}

RANKS_TEST(DiagnoseRules, ParametersWithoutValues, 2) {
  Net net = nullptr;
  {
    const fsdp2::MetaDeviceGuard meta;
    net = Net(2);
  }
  shard(net);
  EXPECT_EQ(only(look(net), "parameter-on-meta").where, "embed.weight");
  fsdp2::to_empty(net, torch::kCPU);
  EXPECT_FALSE(look(net).has("parameter-on-meta"));
  EXPECT_EQ(only(look(net), "parameter-unwritten").where, "embed.weight");
  torch::manual_seed(0);
  fsdp2::reset_parameters(net);
  EXPECT_CLEAN(look(net));
}

void touch(const std::filesystem::path& path) { std::ofstream(path) << "data"; }

void replace_in(const std::filesystem::path& path, const std::string& from, const std::string& to) {
  std::string bytes = read_file(path.string());
  const size_t at = bytes.find(from);
  ASSERT_NE(at, std::string::npos);
  std::ofstream(path, std::ios::binary) << bytes.replace(at, from.size(), to);
}

// The folder is one for both ranks: made before they start.
TEST(DiagnoseRules, CheckpointFolders) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    Net net = shard(Net(2));
    const std::filesystem::path run = folder.path();
    const auto look_in = [&](const std::filesystem::path& place) {
      fsdp2::barrier();
      const Diagnosis found = look(net, nullptr, {.checkpoint_folder = place});
      fsdp2::barrier();
      return found;
    };
    fsdp2::dcp::StateDict state;
    state["model"] = fsdp2::get_model_state_dict(net);
    fsdp2::dcp::save(state, run / "step-1");
    fsdp2::dcp::save(state, run / "step-2");
    EXPECT_CLEAN(look_in(run));
    EXPECT_CLEAN(look_in(run / "step-1"));
    EXPECT_EQ(only(look_in(run / "nowhere"), "checkpoint-unreadable").severity, Severity::kError);

    if (rank == 0) touch(run / "step-1" / "model.safetensors");
    const Diagnosis formats = look_in(run);
    EXPECT_EQ(only(formats, "checkpoint-mixed-formats").where, "step-1");
    EXPECT_TRUE(only(formats, "checkpoint-mixed-formats").ranks.empty());
    if (rank == 0) std::filesystem::remove(run / "step-1" / "model.safetensors");

    if (rank == 0) touch(run / "step-2" / "__3_0.distcp");
    EXPECT_EQ(only(look_in(run / "step-2"), "checkpoint-mixed-world-sizes").severity, Severity::kWarning);
    if (rank == 0) std::filesystem::remove(run / "step-2" / "__3_0.distcp");

    if (rank == 0) replace_in(run / "step-2" / ".metadata", "1.0.0", "0.9.0");
    EXPECT_NE(only(look_in(run), "checkpoint-mixed-versions").what.find("format 0.9.0"), std::string::npos);
    if (rank == 0) replace_in(run / "step-2" / ".metadata", "0.9.0", "1.0.0");
    EXPECT_CLEAN(look_in(run));

    const auto alone = fsdp2::new_group({0});
    fsdp2::dcp::StateDict number;
    number["step"] = 3;
    if (rank == 0) fsdp2::dcp::save(number, run / "step-3", {.group = alone});
    const Finding sizes = only(look_in(run), "checkpoint-mixed-world-sizes");
    EXPECT_EQ(sizes.severity, Severity::kNote);
    EXPECT_NE(sizes.what.find("step-1 by 2 ranks, step-3 by 1 ranks"), std::string::npos) << sizes.what;

    if (rank == 0) std::filesystem::resize_file(run / "step-2" / ".metadata", 10);
    EXPECT_TRUE(look_in(run).has("checkpoint-unreadable"));
  }));
}

TEST(DiagnoseRules, TheTableOfTheDocumentationHasEveryRule) {
  const std::string page = read_file(test_file("../docs/diagnose.md"));
  std::set<std::string> known;
  for (const std::string& rule : fsdp2::diagnose_rules()) {
    EXPECT_NE(page.find("| `" + rule + "` |"), std::string::npos) << rule;
    EXPECT_TRUE(known.insert(rule).second) << rule << " is there twice";
  }
}

}  // namespace
