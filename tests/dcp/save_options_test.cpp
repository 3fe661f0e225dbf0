// labels: ranks
// Options of save and load: files, replicas, values of each rank, storages, patterns, plans; and verify.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "dcp/hooked_storage.h"
#include "dcp/patterns.h"
#include "dcp/same.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

dcp::StateDict state_of(const DeviceMesh& mesh, int64_t seed) {
  const torch::Tensor values = torch::arange(60, torch::kFloat).reshape({12, 5}) + seed;
  dcp::StateDict model;
  for (int i = 0; i < 5; ++i)
    model["w" + std::to_string(i)] = distribute_tensor(values * (i + 1), mesh, {Shard{0}}).tensor();
  model["scale"] = torch::full({}, static_cast<float>(seed));
  return {{"model", model}, {"step", seed}, {"lrs", std::vector<dcp::Value>{0.1, 0.2}}};
}

TEST(SaveOptions, FilesAsAskedFor) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {2});
    const dcp::StateDict state = state_of(mesh, 3);
    const auto check = [&](const std::string& path) {
      dcp::StateDict target = state_of(mesh, 0);
      dcp::load(target, path);
      EXPECT_TRUE(same(target, state)) << path;
      if (rank == 0) {
        const dcp::VerifyReport report = dcp::verify(path);
        EXPECT_TRUE(report.ok()) << path << ": " << (report.faults.empty() ? "" : report.faults[0].text);
        EXPECT_TRUE(report.unreferenced.empty());
      }
      barrier();
    };
    const std::string many = folder.path() + "/many", items = folder.path() + "/items",
                      alone = folder.path() + "/alone";
    dcp::save(state, many, {.files_per_rank = 3});
    EXPECT_EQ(names_in(many), (std::set<std::string>{".checksums", ".metadata", "__0_0.distcp", "__0_1.distcp",
                                                     "__0_2.distcp", "__1_0.distcp", "__1_1.distcp", "__1_2.distcp"}));
    check(many);
    dcp::save(state, items, {.file_per_item = true});
    // Two chunks of each of the five, three other items.
    EXPECT_EQ(names_in(items).size(), 2u + 10 + 3);
    check(items);
    dcp::save(state, alone, {.rank_local_metadata = true});
    EXPECT_EQ(names_in(alone),
              (std::set<std::string>{".checksums", "__0.metadata", "__0_0.distcp", "__1.metadata", "__1_0.distcp"}));
    check(alone);
    EXPECT_FSDP2_ERROR(dcp::save(state, folder.path() + "/x", {.files_per_rank = 0}), kInvalidArgument,
                       "files_per_rank is 0");
    EXPECT_FSDP2_ERROR(dcp::save(state, folder.path() + "/x", {.files_per_rank = 2, .file_per_item = true}),
                       kInvalidArgument, "exclude each other");
    EXPECT_FALSE(fs::exists(folder.path() + "/x"));
  }));
}

TEST(SaveOptions, ReplicasAreSpreadOrOfTheLowestRank) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(4, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {2, 2});
    const torch::Tensor values = torch::arange(4096, torch::kFloat).reshape({64, 64});
    dcp::StateDict state;
    for (int i = 0; i < 4; ++i)
      state["w" + std::to_string(i)] = distribute_tensor(values, mesh, {Replicate{}, Shard{0}}).tensor();
    const auto bytes_of = [&](const std::string& path) {
      return fs::file_size(path + "/__" + std::to_string(rank) + "_0.distcp");
    };
    dcp::save(state, folder.path() + "/spread");
    EXPECT_GT(bytes_of(folder.path() + "/spread"), 16384u);
    EXPECT_LT(bytes_of(folder.path() + "/spread"), 3u * 8192 + 1);
    dcp::save(state, folder.path() + "/lowest", {.replicas = dcp::Replicas::LowestRank});
    const bool writes = rank < 2;  // the first row of the mesh holds everything
    EXPECT_EQ(bytes_of(folder.path() + "/lowest") > 0, writes);
    dcp::StateDict target;
    for (const auto& [key, value] : state) target[key] = torch::zeros({64, 64});
    dcp::load(target, folder.path() + "/lowest");
    for (const auto& [key, value] : target) EXPECT_TRUE(value.tensor().equal(values));
  }));
}

TEST(SaveOptions, ReplicasThatDifferAreAnErrorNamingThem) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(3, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {3});
    torch::Tensor plain = torch::ones({100});
    if (rank == 2) plain[50] = 2;
    EXPECT_FSDP2_ERROR(dcp::save({{"bias", plain}}, folder.path() + "/a"), kInvalidArgument,
                       "bias differs between ranks: rank 0 has one tensor, rank 2 another");
    const DTensor replicated = from_local(plain, mesh, {Replicate{}});
    EXPECT_FSDP2_ERROR(dcp::save({{"r", replicated.tensor()}}, folder.path() + "/a"), kInvalidArgument, "per_rank");
    EXPECT_FSDP2_ERROR(dcp::save({{"t", dcp::Value::tuple({plain, 1})}}, folder.path() + "/a"), kInvalidArgument,
                       "t differs between ranks: rank 0 has one value, rank 2 another");
    barrier();
    EXPECT_TRUE(fs::is_empty(folder.path()));
  }));
}

TEST(SaveOptions, ValuesOfEachRank) {
  const TempDir folder;
  const std::string path = folder.path() + "/ckpt";
  ASSERT_TRUE(run_ranks(3, [&](int rank) {
    const dcp::StateDict nested{{"seed", 100 + rank}, {"state", torch::full({2}, static_cast<float>(rank))}};
    dcp::save({{"rng", dcp::per_rank(nested)}, {"rank", dcp::per_rank(rank)}, {"step", 5}}, path);
    dcp::StateDict target{{"rng", dcp::per_rank(dcp::StateDict{{"seed", 0}, {"state", torch::zeros({2})}})},
                          {"rank", dcp::per_rank(nullptr)},
                          {"step", 0}};
    for (int round = 0; round < 2; ++round) {  // the marks survive a load
      dcp::load(target, path);
      EXPECT_EQ(target.at("rank").integer(), rank);
      EXPECT_EQ(target.at("rng").dict().at("seed").integer(), 100 + rank);
      EXPECT_TRUE(target.at("rng").dict().at("state").tensor().equal(torch::full({2}, static_cast<float>(rank))));
    }
    // What the other ranks ask for is not unexpected.
    const dcp::LoadReport report = dcp::load(target, path, {.allow_unexpected = std::vector<std::string>{}});
    EXPECT_TRUE(report.unexpected.empty());
    dcp::StateDict unmarked{{"rank", 0}};
    EXPECT_FSDP2_ERROR(dcp::load(unmarked, path), kNotFound, "one for each rank");
  }));
  ASSERT_TRUE(run_ranks(4, [&](int) {
    dcp::StateDict target{{"rank", dcp::per_rank(-1)}};
    EXPECT_FSDP2_ERROR(dcp::load(target, path), kNotFound, "rank.3");
    dcp::load(target, path, {.allow_missing = {"rank.*"}});
    EXPECT_EQ(target.at("rank").integer(), get_rank() < 3 ? get_rank() : -1);
  }));
}

TEST(SaveOptions, KeysThatMayBeMissingOrUnexpected) {
  const TempDir folder;
  const std::string path = folder.path() + "/ckpt";
  dcp::save({{"a", 1}, {"model", dcp::StateDict{{"b", 2}, {"c", 3}}}}, path);
  dcp::StateDict target{{"a", 0}, {"head", dcp::StateDict{{"w", 7}, {"x", 8}}}};
  EXPECT_FSDP2_ERROR(dcp::load(target, path, {.allow_missing = {"head.w"}}), kNotFound, "head.x");
  EXPECT_EQ(target.at("a").integer(), 0) << "nothing may change";
  const dcp::LoadReport report = dcp::load(target, path, {.allow_missing = {"head.*"}});
  EXPECT_EQ(report.missing, (std::vector<std::string>{"head.w", "head.x"}));
  EXPECT_EQ(target.at("a").integer(), 1);
  EXPECT_FSDP2_ERROR(
      dcp::load(target, path, {.allow_partial = true, .allow_unexpected = std::vector<std::string>{"*.c"}}),
      kInvalidArgument, "model.b");
  dcp::load(target, path, {.allow_partial = true, .allow_unexpected = std::vector<std::string>{"model.*"}});

  using dcp::detail::matches;
  EXPECT_TRUE(matches("*", ""));
  EXPECT_TRUE(matches("a*b*c", "a..b.b.c"));
  EXPECT_FALSE(matches("a*b*c", "a..b.b.cd"));
  EXPECT_FALSE(matches("", "a"));
  EXPECT_TRUE(matches("layers.*.weight", "layers.0.mlp.weight"));
  EXPECT_FALSE(matches("weight", "weights"));
}

TEST(SaveOptions, OneTensorUnderTwoKeysNeedsOneValue) {
  const auto memory = dcp::make_memory_storage();
  const torch::Tensor one = torch::arange(12, torch::kFloat).reshape({3, 4});
  dcp::save({{"a", one}, {"b", one}}, "tied", {.storage = memory});
  dcp::save({{"a", one}, {"b", one + 1}}, "untied", {.storage = memory});
  const torch::Tensor shared = torch::zeros({3, 4});
  dcp::StateDict target{{"a", shared}, {"b", shared}};
  dcp::load(target, "tied", {.storage = memory});
  EXPECT_TRUE(shared.equal(one));
  EXPECT_FSDP2_ERROR(dcp::load(target, "untied", {.storage = memory}), kInvalidArgument, "a and b are one tensor");
}

TEST(SaveOptions, InMemory) {
  const auto memory = dcp::make_memory_storage();
  const dcp::StateDict state{{"x", torch::arange(5)}, {"s", "text"}};
  dcp::save(state, "run/step_1", {.storage = memory});
  EXPECT_FSDP2_ERROR(dcp::save(state, "run/step_1", {.storage = memory}), kInvalidArgument, "overwrite");
  dcp::save(state, "run/step_2/", {.overwrite = true, .storage = memory});
  EXPECT_EQ(memory->list("run"), (std::vector<std::string>{"step_1/", "step_2/"}));
  EXPECT_EQ(memory->list("run/step_2"), (std::vector<std::string>{".checksums", ".metadata", "__0_0.distcp"}));
  dcp::StateDict target{{"x", torch::zeros({5}, torch::kInt64)}, {"s", nullptr}};
  dcp::load(target, "run/step_2", {.storage = memory});
  EXPECT_TRUE(same(target, state));
  EXPECT_TRUE(dcp::verify("run/step_1", {.storage = memory}).ok());
  memory->remove("run/step_1");
  EXPECT_FSDP2_ERROR(dcp::load(target, "run/step_1", {.storage = memory}), kNotFound, "no checkpoint");
  EXPECT_FALSE(fs::exists("run"));
}

// What every rank wants whole is read by one of them.
TEST(SaveOptions, ReplicasAreReadOnceAndBroadcast) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(3, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {3});
    const torch::Tensor big = torch::arange(90000, torch::kFloat).reshape({300, 300});
    const auto state_with = [&](const torch::Tensor& values) {
      dcp::StateDict state;
      for (const char* key : {"a", "b", "c"}) state[key] = values.clone();
      state["replicated"] = distribute_tensor(values, mesh, {Replicate{}}).tensor();
      state["sharded"] = distribute_tensor(values, mesh, {Shard{0}}).tensor();
      state["cast"] = values.to(rank == 1 ? torch::kDouble : torch::kFloat);  // not alike on all ranks
      state["small"] = torch::ones({2});
      return state;
    };
    dcp::StateDict saved = state_with(big);
    saved["cast"] = big;
    dcp::save(saved, folder.path() + "/ckpt", {.file_per_item = true});
    for (const bool broadcast : {true, false}) {
      std::set<std::string> opened;
      const auto storage = std::make_shared<HookedStorage>([&](const std::string& operation, const std::string& name) {
        if (operation == "read" && fs::file_size(name) > 100000) opened.insert(name);
      });
      dcp::StateDict target = state_with(torch::zeros_like(big));
      dcp::load(target, folder.path() + "/ckpt", {.broadcast_replicas = broadcast, .storage = storage});
      for (const char* key : {"a", "b", "c"}) EXPECT_TRUE(target.at(key).tensor().equal(big)) << key;
      EXPECT_TRUE(same(target.at("replicated"), saved.at("replicated"), "replicated"));
      EXPECT_TRUE(same(target.at("sharded"), saved.at("sharded"), "sharded"));
      EXPECT_TRUE(target.at("cast").tensor().to(torch::kFloat).equal(big));
      // Four that all want whole, dealt over three ranks; "cast" and this rank's third of "sharded" besides.
      const size_t whole = broadcast ? (rank == 0 ? 2 : 1) : 4;
      EXPECT_EQ(opened.size(), whole + 2) << rank;
    }
  }));
}

TEST(SaveOptions, OptionsThatDifferBetweenRanksAreAnError) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    const dcp::StateDict state{{"x", torch::ones({2})}};
    const std::string path = folder.path() + "/ckpt";
    dcp::SaveOptions differing[5];
    if (rank == 1) {
      differing[0].checksums = false;
      differing[1].zstd = true;
      differing[2].replicas = dcp::Replicas::LowestRank;
      differing[3].rank_local_metadata = true;
      differing[4].overwrite = true;
    }
    for (const dcp::SaveOptions& options : differing)
      EXPECT_FSDP2_ERROR(dcp::save(state, path, options), kInvalidArgument, "rank 0 with path");
    EXPECT_FSDP2_ERROR(dcp::save(state, path + std::to_string(rank)), kInvalidArgument, "ckpt1");
    barrier();
    EXPECT_TRUE(fs::is_empty(folder.path()));
    barrier();
    dcp::save(state, path);
    dcp::StateDict target = state;
    EXPECT_FSDP2_ERROR(dcp::load(target, rank == 0 ? path : path + "x"), kInvalidArgument, "rank 0 from");
  }));
}

TEST(SaveOptions, AFolderThatRanksDoNotShareIsSaid) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    const std::string path = folder.path() + "/0/ckpt";
    // Each rank has a disk of its own: rank 1 does not see what rank 0 makes.
    const auto own = rank == 0 ? dcp::local_storage() : dcp::make_memory_storage();
    EXPECT_FSDP2_ERROR(dcp::save({{"x", torch::ones({2})}}, path, {.storage = own}), kIo, "all ranks share");
    barrier();
    EXPECT_TRUE(rank != 0 || names_in(folder.path() + "/0").empty());
  }));
}

// The plan of a layout is used again, and not where a layout has changed, be it on one rank alone.
TEST(SaveOptions, PlansFollowTheLayouts) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {2});
    for (const int64_t seed : {1, 2, 3}) {
      dcp::StateDict state = state_of(mesh, seed);
      if (seed == 3) state["extra"] = torch::ones({2});
      dcp::save(state, folder.path() + "/ckpt", {.overwrite = true});
      dcp::StateDict target = state_of(mesh, 0);
      if (seed == 3) target["extra"] = torch::zeros({2});
      dcp::load(target, folder.path() + "/ckpt", {.allow_unexpected = std::vector<std::string>{}});
      EXPECT_TRUE(same(target, state)) << seed;
    }
    // One rank's layout changes: the plan of the last save holds for the other rank alone.
    dcp::StateDict state = state_of(mesh, 4);
    state["extra"] = torch::ones({rank == 0 ? 2 : 3});
    EXPECT_FSDP2_ERROR(dcp::save(state, folder.path() + "/ckpt", {.overwrite = true}), kInvalidArgument,
                       "rank 1 has shape [3]");
  }));
}

TEST(Verify, NamesWhatIsWrongAndWhatIsNotReferenced) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  const auto fresh = [&] { dcp::save({{"a", torch::arange(1000)}, {"b", 7}}, path, {.overwrite = true}); };
  fresh();
  std::vector<uint64_t> seen;
  const dcp::VerifyReport good = dcp::verify(path, {}, [&](uint64_t done, uint64_t total) {
    EXPECT_LE(done, total);
    seen.push_back(done);
  });
  EXPECT_TRUE(good.ok());
  EXPECT_EQ(good.items, 2u);
  EXPECT_EQ(good.bytes, fs::file_size(path / "__0_0.distcp"));
  EXPECT_EQ(seen.back(), good.bytes);
  EXPECT_TRUE(good.has_checksums);

  std::ofstream(path / "__5_0.distcp") << "left from another save";
  EXPECT_EQ(dcp::verify(path).unreferenced, (std::vector<std::string>{"__5_0.distcp"}));

  std::fstream file(path / "__0_0.distcp", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(good.bytes - 2000));
  file.put('\x55');
  file.close();
  const dcp::VerifyReport bad = dcp::verify(path);
  ASSERT_EQ(bad.faults.size(), 1u);
  EXPECT_EQ(bad.faults[0].file, "__0_0.distcp");
  EXPECT_EQ(bad.faults[0].key, "a");
  EXPECT_NE(bad.faults[0].text.find("checksum"), std::string::npos);

  fresh();
  fs::resize_file(path / "__0_0.distcp", good.bytes - 1);
  EXPECT_FALSE(dcp::verify(path).ok());
  fresh();
  std::ofstream(path / "__0_0.distcp", std::ios::app) << "x";
  EXPECT_FALSE(dcp::verify(path).ok());
  fresh();
  std::ofstream(path / ".metadata") << "nonsense";
  const dcp::VerifyReport unreadable = dcp::verify(path);
  ASSERT_EQ(unreadable.faults.size(), 1u);
  EXPECT_EQ(unreadable.faults[0].file, ".metadata");
  EXPECT_FSDP2_ERROR(dcp::verify(path / "nowhere"), kNotFound, "no checkpoint");
}

}  // namespace
}  // namespace fsdp2::testing
