// labels: ranks
// backends: gloo, shm
// Ranks that differ: found on all of them, without waiting for each other; and FSDP2_DIAGNOSE.

#include <nlohmann/json.hpp>

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "diagnose/between_ranks.h"
#include "fsdp/models.h"
#include "support/ranks.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::DiagnoseOptions;
using fsdp2::Diagnosis;
using fsdp2::Finding;
using fsdp2::Severity;
using fsdp2::detail::diagnose::RankRow;
using torch::Tensor;
using Ranks = std::vector<int>;

Tensor tokens() { return torch::arange(8).view({2, 4}); }

/// Also that all ranks got the same.
Diagnosis look(fsdp2::ModuleRef model, DiagnoseOptions options = {.small_group_bytes = 1}) {
  const Diagnosis found = fsdp2::diagnose(model, nullptr, options);
  for (const std::string& other : fsdp2::all_gather_strings(found.to_json())) EXPECT_EQ(other, found.to_json());
  return found;
}

Finding first(const Diagnosis& found, const std::string& rule) {
  for (const Finding& each : found) {
    if (each.rule == rule) return each;
  }
  ADD_FAILURE() << rule << " is not in:\n" << found.to_table();
  return {};
}

RANKS_TEST(DiagnoseBetweenRanks, OtherModelsAreAFindingOnAllRanks, 3) {
  Net net = shard(Net(rank == 2 ? 3 : 2));
  const Diagnosis found = look(net);
  const Finding block = first(found, "ranks-differ");
  EXPECT_EQ(block.severity, Severity::kError);
  EXPECT_EQ(block.where.substr(0, 7), "block2.");
  EXPECT_NE(block.what.find("rank 2 has it"), std::string::npos) << block.what;
  EXPECT_TRUE(look(shard(Net(2))).empty());
}

RANKS_TEST(DiagnoseBetweenRanks, OtherShapesDtypesAndGroupsToo, 2) {
  Net net(2, rank == 0 ? 6 : 8);
  EXPECT_NE(first(look(shard(net)), "ranks-differ").what.find("; rank 1 has [8] Float"), std::string::npos);
  Net grouped(2);
  if (rank == 0) fsdp2::fully_shard(grouped->blocks[0]);
  if (rank == 1) fsdp2::fully_shard(grouped->blocks[1]);
  fsdp2::fully_shard(grouped);
  EXPECT_NE(first(look(grouped), "ranks-differ").what.find("the group of"), std::string::npos);
  Net frozen(2);
  frozen->head->weight.set_requires_grad(rank == 0);
  EXPECT_EQ(first(look(shard(frozen)), "ranks-differ").where, "head.weight");
  Net unsharded(2);
  if (rank == 0) shard(unsharded);
  EXPECT_TRUE(look(unsharded).has("ranks-differ"));
}

RANKS_TEST(DiagnoseBetweenRanks, AFindingOfOneRankNamesIt, 2) {
  Net net = shard(Net(2));
  if (rank == 1) {
    EXPECT_THROW(net->forward(tokens()), fsdp2::Error);
  }
  const Finding refused = first(look(net), "forward-refused");
  EXPECT_EQ(refused.ranks, Ranks{1});
}

RANKS_TEST(DiagnoseBetweenRanks, GradientsOnSomeRanksOnly, 2) {
  Net net = shard(Net(2));
  loss_of(net, tokens()).backward();
  EXPECT_TRUE(look(net).empty());
  if (rank == 1) net->head->weight.mutable_grad() = Tensor();
  const Finding missing = first(look(net), "gradients-missing");
  EXPECT_EQ(missing.where, "head.weight");
  EXPECT_EQ(missing.ranks, Ranks{1});
  if (rank == 0) net->head->weight.mutable_grad() = Tensor();
  EXPECT_TRUE(look(net).empty());
}

RANKS_TEST(DiagnoseBetweenRanks, BuffersThatDiffer, 3) {
  Net net(2);
  Tensor scale = fsdp2::register_buffer(*net, "scale", torch::full({2}, rank == 1 ? 2.0 : 1.0));
  shard(net);
  const Finding buffer = first(look(net), "buffers-differ");
  EXPECT_EQ(buffer.where, "scale");
  EXPECT_EQ(buffer.ranks, Ranks{1});
  EXPECT_TRUE(look(net, {.compare_values = false, .small_group_bytes = 1}).empty());
  EXPECT_TRUE(look(net, {.small_group_bytes = 1, .ignore = {"buffers-differ"}}).empty());
  fsdp2::broadcast(scale, 0);
  EXPECT_TRUE(look(net).empty());
}

RANKS_TEST(DiagnoseBetweenRanks, ReplicasThatDiffer, 4) {
  const auto mesh = fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
  const auto build = [&](int seed) {
    torch::manual_seed(seed);
    return shard(Net(2), {.mesh = mesh});
  };
  const Finding replicas = first(look(build(rank / 2)), "replicas-differ");
  EXPECT_EQ(replicas.severity, Severity::kError);
  EXPECT_EQ(replicas.ranks, (Ranks{2, 3}));
  Net equal = build(7);
  torch::optim::AdamW optimizer(equal->parameters(), 1e-2);
  torch::manual_seed(rank);
  loss_of(equal, torch::randint(Net::Impl::kVocab, {2, 4})).backward();
  optimizer.step();
  EXPECT_TRUE(look(equal).empty()) << look(equal).to_table();
}

RANKS_TEST(DiagnoseBetweenRanks, OptionsThatDifferOrAreUnknown, 2) {
  Net net = shard(Net(2));
  EXPECT_FSDP2_ERROR(fsdp2::diagnose(net, nullptr, {.compare_values = rank == 0}), kInvalidArgument,
                     "different options");
  EXPECT_FSDP2_ERROR(fsdp2::diagnose(net, nullptr, {.ignore = {"no-such-rule"}}), kInvalidArgument, "no-such-rule");
}

RANKS_TEST(DiagnoseBetweenRanks, JsonHoldsWhatTheFindingsSay, 2) {
  Net net = shard(Net(2));
  if (rank == 0) net->head->weight.mutable_grad() = Tensor();
  if (rank == 1) {
    EXPECT_THROW(net->forward(tokens()), fsdp2::Error);
  }
  const Diagnosis found = look(net);
  const auto parsed = nlohmann::json::parse(found.to_json());
  ASSERT_EQ(parsed["findings"].size(), 1u);
  const auto& finding = parsed["findings"][0];
  EXPECT_EQ(finding["rule"], "forward-refused");
  EXPECT_EQ(finding["severity"], "error");
  EXPECT_EQ(finding["where"], "embed.weight");
  EXPECT_EQ(finding["ranks"], nlohmann::json::array({1}));
  EXPECT_EQ(finding["what"], found.findings[0].what);
  EXPECT_EQ(finding["fix"], found.findings[0].fix);
  EXPECT_EQ(parsed["errors"], 1);
  EXPECT_EQ(parsed["warnings"], 0);
  EXPECT_NE(found.to_table().find("error  forward-refused  embed.weight  (rank 1)"), std::string::npos);
  EXPECT_NE(found.to_table().find("1 error, 0 warnings, 0 notes"), std::string::npos);
}

// GPUs as they would be: the rows are all that the rule sees.
TEST(DiagnoseBetweenRanks, DevicesOfRanks) {
  const auto gpu = [](int64_t host, int64_t index, int64_t local_rank, int64_t visible = 8) {
    RankRow row;
    row.host = host;
    row.device = 100 + index;
    row.device_index = index;
    row.local_rank = local_rank;
    row.visible_devices = visible;
    return row;
  };
  const auto check = [](const std::vector<RankRow>& rows) {
    fsdp2::Diagnosis result;
    fsdp2::detail::diagnose::check_devices(rows, result.findings);
    return result;
  };
  EXPECT_TRUE(check({gpu(1, 0, 0), gpu(1, 1, 1), gpu(2, 0, 0), gpu(2, 1, 1)}).empty());
  // LOCAL_RANK is there and was not used.
  const Diagnosis shared = check({gpu(1, 0, 0), gpu(1, 1, 1), gpu(1, 0, 2)});
  EXPECT_EQ(first(shared, "shared-device").ranks, (Ranks{0, 2}));
  EXPECT_EQ(first(shared, "local-rank").ranks, Ranks{2});
  // It was not set.
  EXPECT_EQ(first(check({gpu(1, 0, 0), gpu(1, 1, 0)}), "local-rank").severity, Severity::kError);
  // Every process sees one GPU, another one: its number says nothing.
  RankRow second = gpu(1, 0, 1, 1);
  second.device = 200;
  EXPECT_TRUE(check({gpu(1, 0, 0, 1), second}).empty());
}

TEST(DiagnoseBetweenRanks, OneLocalRankForAllIsANoteOnTheCpu) {
  const TempDir folder;
  const auto body = [&](bool mended) {
    return [&folder, mended](int rank) {
      fsdp2::init_process_group({.backend = "gloo",
                                 .init_method = "file://" + folder.path() + (mended ? "/mended" : "/store"),
                                 .rank = rank,
                                 .world_size = 2,
                                 .local_rank = mended ? rank : 0});
      const Diagnosis found = look(shard(Net(2)));
      EXPECT_EQ(found.has("local-rank"), !mended) << found.to_table();
      if (!mended) {
        EXPECT_EQ(first(found, "local-rank").severity, Severity::kNote);
      }
    };
  };
  ASSERT_TRUE(run_ranks(2, body(false), {.init_process_group = false}));
  ASSERT_TRUE(run_ranks(2, body(true), {.init_process_group = false}));
}

TEST(DiagnoseBetweenRanks, OneRankOfManyWithoutTheOthers) {
  ASSERT_TRUE(run_ranks(1,
                        [](int) {
                          fsdp2::init_process_group({.backend = "fake", .rank = 3, .world_size = 1024});
                          Net net = nullptr;
                          {
                            const fsdp2::MetaDeviceGuard meta;
                            net = Net(2);
                          }  // where it may stay, under this backend
                          const Diagnosis found = fsdp2::diagnose(shard(net), nullptr, {.small_group_bytes = 1});
                          EXPECT_TRUE(found.empty()) << found.to_table();
                          Net other(3);
                          fsdp2::fully_shard(other);
                          EXPECT_TRUE(
                              fsdp2::diagnose(other, nullptr, {.small_group_bytes = 1}).has("only-root-sharded"));
                        },
                        {.init_process_group = false}));
}

/// What `action` writes to stderr.
template <class Action>
std::string stderr_of(const std::string& path, Action&& action) {
  std::fflush(stderr);
  const int before = dup(STDERR_FILENO), file = open(path.c_str(), O_CREAT | O_RDWR | O_TRUNC, 0600);
  dup2(file, STDERR_FILENO);
  action();
  std::fflush(stderr);
  dup2(before, STDERR_FILENO);
  close(before);
  close(file);
  return read_file(path);
}

/// Two processes with FSDP2_DIAGNOSE=1 on rank 0 alone: the others take part.
::testing::AssertionResult run_with_variable(const std::string& value, const std::function<void(int)>& body) {
  const TempDir folder;
  return run_ranks(2,
                   [&](int rank) {
                     if (rank == 0) setenv("FSDP2_DIAGNOSE", value.c_str(), 1);
                     fsdp2::init_process_group({.backend = "gloo",
                                                .init_method = "file://" + folder.path() + "/store",
                                                .rank = rank,
                                                .world_size = 2,
                                                .local_rank = rank});
                     const std::string path = folder.path() + "/stderr" + std::to_string(rank);
                     const std::string text = stderr_of(path, [&] { body(rank); });
                     const size_t at = text.find("FSDP2_DIAGNOSE=1, after the first step of");
                     EXPECT_EQ(at != std::string::npos, rank == 0 && value == "1") << text;
                     if (at == std::string::npos) return;
                     EXPECT_NE(text.find("\nwarning  only-root-sharded\n", at), std::string::npos) << text;
                     EXPECT_EQ(text.find("FSDP2_DIAGNOSE=1", at + 1), std::string::npos) << text;  // once
                   },
                   {.init_process_group = false});
}

void train(int steps) {
  Net net(3, 64);  // its blocks have 66 KB each
  fsdp2::fully_shard(net);
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);
  for (int step = 0; step < steps; ++step) {
    loss_of(net, tokens()).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  fsdp2::destroy_process_group();
}

TEST(DiagnoseBetweenRanks, TheVariablePrintsTheTableOnceAfterTheFirstStep) {
  EXPECT_TRUE(run_with_variable("1", [](int) { train(3); }));
  EXPECT_TRUE(run_with_variable("1", [](int) { train(1); }));  // at the end, where there is no second step
  EXPECT_TRUE(run_with_variable("0", [](int) { train(2); }));
  EXPECT_TRUE(run_with_variable("", [](int) { train(2); }));
}

TEST(DiagnoseBetweenRanks, OtherValuesOfTheVariableAreAnError) {
  ASSERT_TRUE(run_ranks(1,
                        [](int) {
                          setenv("FSDP2_DIAGNOSE", "yes", 1);
                          EXPECT_FSDP2_ERROR(fsdp2::init_process_group({.backend = "fake", .rank = 0, .world_size = 2}),
                                             kInvalidArgument, "FSDP2_DIAGNOSE is \"yes\"; expected 1");
                        },
                        {.init_process_group = false}));
}

}  // namespace
