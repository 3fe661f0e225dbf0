// Saving and loading in one process, without a process group: reports, casts, refusals, hostile
// folders.

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>

#include "dcp/metadata_files.h"
#include "dcp/same.h"
#include "support/ranks.h"

namespace fsdp2::dcp {
namespace {

namespace fs = std::filesystem;
using fsdp2::testing::read_file;
using fsdp2::testing::same;
using fsdp2::testing::TempDir;

StateDict simple(float value) {
  StateDict state;
  state["weight"] = torch::full({3, 2}, value);
  state["meta"] = StateDict{{"epoch", static_cast<int>(value)}, {"name", "run"}};
  return state;
}

void spill(const fs::path& path, const std::string& content) { std::ofstream(path, std::ios::binary) << content; }

TEST(DcpSave, RoundTripInPlaceWithReport) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  const Metadata metadata = save(simple(5), path);
  EXPECT_EQ(metadata.entries.size(), 3u);
  EXPECT_EQ(metadata.paths.at("meta.epoch").size(), 2u);
  StateDict state = simple(0);
  const torch::Tensor weight = state["weight"].tensor();
  const LoadReport report = load(state, path);
  EXPECT_TRUE(same(state, simple(5)));
  EXPECT_TRUE(weight.equal(torch::full({3, 2}, 5.0f)));
  EXPECT_EQ(report.loaded.size(), 3u);
  Reader reader(path);
  EXPECT_TRUE(same(reader.read_all(), simple(5)));
  EXPECT_EQ(reader.read("meta.epoch").integer(), 5);
  EXPECT_FSDP2_ERROR(reader.read("nothing"), kNotFound, "nothing");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1)
      << "a staging folder is left";
}

TEST(DcpSave, OverwritingIsAskedForAndReplacesTheFolder) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  save(simple(1), path);
  spill(path / "__7_0.distcp", "stale");
  EXPECT_FSDP2_ERROR(save(simple(2), path), kInvalidArgument, "overwrite");
  StateDict state = simple(0);
  load(state, path);
  EXPECT_EQ(state["meta"].dict()["epoch"].integer(), 1);
  save(simple(2), path, {.overwrite = true});
  load(state, path);
  EXPECT_EQ(state["meta"].dict()["epoch"].integer(), 2);
  EXPECT_FALSE(fs::exists(path / "__7_0.distcp"));
  spill(path / "notes.txt", "mine");
  EXPECT_FSDP2_ERROR(save(simple(3), path, {.overwrite = true}), kInvalidArgument, "notes.txt");
  EXPECT_EQ(read_file(path / "notes.txt"), "mine");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1)
      << "a staging folder is left";
  fs::create_directory(fs::path(folder.path()) / "empty");
  save(simple(3), fs::path(folder.path()) / "empty/");
  EXPECT_EQ(Reader(fs::path(folder.path()) / "empty").read("meta.epoch").integer(), 3);
}

TEST(DcpSave, WhatCannotBeSavedIsNamed) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  EXPECT_FSDP2_ERROR(save(StateDict{{"a.b", 1}, {"a", StateDict{{"b", 2}}}}, path), kInvalidArgument, "a.b");
  EXPECT_FSDP2_ERROR(save(StateDict{{"m", torch::empty({2}, torch::kMeta)}}, path), kInvalidArgument, "meta device");
  EXPECT_FSDP2_ERROR(save(StateDict{{"s", torch::eye(2).to_sparse()}}, path), kUnsupported, "Sparse");
  EXPECT_FSDP2_ERROR(save(simple(1), "/proc/nowhere/ckpt"), kIo, "/proc");
  EXPECT_FALSE(fs::exists(path));
}

TEST(DcpLoad, MissingKeysAndOtherSizes) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  save(simple(5), path);
  StateDict state = simple(0);
  state["bias"] = torch::zeros({2});
  EXPECT_FSDP2_ERROR(load(state, path), kNotFound, "bias");
  EXPECT_TRUE(state["weight"].tensor().equal(torch::zeros({3, 2}))) << "changed although the load failed";
  const LoadReport report = load(state, path, {.allow_partial = true});
  EXPECT_EQ(report.missing, std::vector<std::string>{"bias"});
  state = StateDict{{"weight", torch::zeros({2, 3})}};
  EXPECT_FSDP2_ERROR(load(state, path), kInvalidArgument, "[3, 2]");
  state = StateDict{{"weight", 1}};
  EXPECT_FSDP2_ERROR(load(state, path), kInvalidArgument, "weight");
  state = StateDict{{"weight", nullptr}};
  load(state, path);
  EXPECT_TRUE(state["weight"].tensor().equal(torch::full({3, 2}, 5.0f)));
  state = StateDict{{"weight", torch::empty({3, 2}, torch::kMeta)}};
  load(state, path);
  EXPECT_TRUE(state["weight"].tensor().equal(torch::full({3, 2}, 5.0f)));
  EXPECT_FSDP2_ERROR(load(state, path / "nothing"), kNotFound, "no checkpoint");
  EXPECT_FSDP2_ERROR(load(state, folder.path()), kNotFound, ".metadata");
}

TEST(DcpLoad, TargetsWithStridesAndSharedMemory) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  const torch::Tensor values = torch::arange(12, torch::kFloat).reshape({3, 4});
  save(StateDict{{"a", values.t()}, {"b", torch::complex(values, values).conj()}, {"c", values.narrow(1, 1, 2)}}, path);
  StateDict state;
  state["a"] = torch::zeros({3, 4}).t();
  state["b"] = torch::zeros({3, 4}, torch::kComplexFloat);
  state["c"] = torch::zeros({3, 2}, torch::kDouble);
  const LoadReport report = load(state, path);
  EXPECT_TRUE(state["a"].tensor().equal(values.t()));
  EXPECT_TRUE(state["b"].tensor().equal(torch::complex(values, -values)));
  EXPECT_TRUE(state["c"].tensor().equal(values.narrow(1, 1, 2).to(torch::kDouble)));
  EXPECT_EQ(report.cast, std::vector<std::string>{"c"});
}

struct Counter : Stateful {
  int64_t count = 0;
  StateDict state_dict() override { return {{"count", count}}; }
  void load_state_dict(const StateDict& state) override { count = state.at("count").integer(); }
};

TEST(DcpLoad, StatefulObjectsSaveAndLoadThemselves) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  auto counter = std::make_shared<Counter>();
  counter->count = 9;
  save(StateDict{{"cursor", counter}}, path);
  counter->count = 0;
  StateDict state{{"cursor", counter}};
  load(state, path);
  EXPECT_EQ(counter->count, 9);
}

/// Metadata that another program might have written: no `.checksums` gives them away.
void spill_metadata(const fs::path& path, const std::string& pickle) {
  fs::remove(path / ".checksums");
  spill(path / ".metadata", pickle);
}

/// The metadata of a good checkpoint, changed by `lie`, must make every use an error.
void expect_lie_is_caught(const std::function<void(detail::StoredMetadata&)>& lie, const std::string& text) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  save(simple(5), path);
  detail::StoredMetadata stored = detail::read_metadata(*dcp::local_storage(), path);
  lie(stored);
  spill_metadata(path, detail::encode_metadata(stored));
  const auto use = [&] {
    StateDict state = simple(0);
    load(state, path);
  };
  EXPECT_FSDP2_ERROR(use(), kCorruption, text);
  EXPECT_FSDP2_ERROR(Reader(path).read_all(), kCorruption, text);
}

TEST(DcpLoad, LiesOfTheMetadataAreErrors) {
  const auto tensor = [](detail::StoredMetadata& stored) -> TensorEntry& {
    return std::get<TensorEntry>(stored.metadata.entries[stored.find("weight")].second);
  };
  const auto place = [](detail::StoredMetadata& stored) -> detail::ItemLocation& {
    return stored.locations[stored.find("weight")][0];
  };
  expect_lie_is_caught([&](auto& stored) { place(stored).file = "../ckpt/__0_0.distcp"; }, "plain file name");
  expect_lie_is_caught([&](auto& stored) { place(stored).file = "/etc/passwd"; }, "plain file name");
  expect_lie_is_caught([&](auto& stored) { place(stored).file = std::string("a\0b", 3); }, "plain file name");
  expect_lie_is_caught([&](auto& stored) { place(stored).offset += 1; }, "weight");
  expect_lie_is_caught([&](auto& stored) { place(stored).length += 1 << 20; }, "weight");
  expect_lie_is_caught([&](auto& stored) { place(stored).offset = INT64_MAX; }, "weight");
  expect_lie_is_caught([&](auto& stored) { tensor(stored).sizes = {3, -2}; }, "impossible shape");
  expect_lie_is_caught([&](auto& stored) { tensor(stored).sizes = {INT64_MAX, 2}; }, "impossible shape");
  expect_lie_is_caught([&](auto& stored) { tensor(stored).chunks[0].offsets = {1, 0}; }, "leaves the tensor");
  expect_lie_is_caught([&](auto& stored) { tensor(stored).chunks[0].offsets = {0, -1}; }, "leaves the tensor");
  expect_lie_is_caught([&](auto& stored) { tensor(stored).chunks[0].sizes = {3, 1}; }, "3 of 6 elements");
  expect_lie_is_caught([&](auto& stored) { tensor(stored).dtype = at::kHalf; }, "float32");
  expect_lie_is_caught(
      [&](auto& stored) {
        tensor(stored).chunks.clear();
        stored.locations[stored.find("weight")].clear();
      },
      "0 of 6");
  expect_lie_is_caught(
      [&](auto& stored) {
        tensor(stored).chunks.push_back(tensor(stored).chunks[0]);
        stored.locations[stored.find("weight")].push_back(place(stored));
      },
      "overlap");
  expect_lie_is_caught(
      [&](auto& stored) {
        stored.metadata.entries.push_back(stored.metadata.entries[0]);
        stored.locations.push_back(stored.locations[0]);
      },
      "twice");
}

TEST(DcpLoad, HugeSizesAreRefusedBeforeMemoryIsTaken) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  save(simple(5), path);
  detail::StoredMetadata stored = detail::read_metadata(*dcp::local_storage(), path);
  auto& entry = std::get<TensorEntry>(stored.metadata.entries[stored.find("weight")].second);
  entry.sizes = entry.chunks[0].sizes = {int64_t{1} << 40, 2};
  spill_metadata(path, detail::encode_metadata(stored));
  EXPECT_FSDP2_ERROR(Reader(path).read("weight"), kCorruption, "needs 8796093022208 bytes");
}

TEST(DcpLoad, IndexesAndPathsOutOfProportionAreRefused) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  save(simple(5), path);
  for (const int64_t index : {int64_t{1} << 40, int64_t{-1}, int64_t{1000000}}) {
    detail::StoredMetadata stored = detail::read_metadata(*dcp::local_storage(), path);
    stored.metadata.paths["weight"] = {"weight", index};
    spill_metadata(path, detail::encode_metadata(stored));
    EXPECT_FSDP2_ERROR(Reader(path).read_all(), kCorruption, "weight");
    stored.metadata.paths["weight"] = {"weight", 0};
    spill_metadata(path, detail::encode_metadata(stored));
  }
  detail::StoredMetadata stored = detail::read_metadata(*dcp::local_storage(), path);
  stored.metadata.paths["weight"] = {"meta", "epoch", "deep"};
  spill_metadata(path, detail::encode_metadata(stored));
  EXPECT_FSDP2_ERROR(Reader(path).read_all(), kCorruption, "another key");
}

TEST(DcpLoad, LinksCutFilesAndForeignPicklesAreRefused) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  save(simple(5), path);
  const std::string data = read_file(path / "__0_0.distcp"), metadata = read_file(path / ".metadata");
  StateDict state = simple(0);

  spill(path / "__0_0.distcp", data.substr(0, data.size() - 1));
  EXPECT_FSDP2_ERROR(load(state, path), kCorruption, "__0_0.distcp");
  fs::remove(path / "__0_0.distcp");
  EXPECT_FSDP2_ERROR(load(state, path), kNotFound, "__0_0.distcp");
  spill(fs::path(folder.path()) / "outside", data);
  fs::create_symlink("../outside", path / "__0_0.distcp");
  EXPECT_FSDP2_ERROR(load(state, path), kCorruption, "link");
  fs::remove(path / "__0_0.distcp");
  fs::create_directory(path / "__0_0.distcp");
  EXPECT_FSDP2_ERROR(load(state, path), kCorruption, "regular file");
  fs::remove(path / "__0_0.distcp");
  spill(path / "__0_0.distcp", data);

  for (size_t length = 0; length < metadata.size(); length += 11) {
    spill(path / ".metadata", metadata.substr(0, length));
    EXPECT_THROW(load(state, path), Error) << length;
  }
  spill_metadata(path,
                 "\x80\x02"
                 "cos\nsystem\nX\x04" +
                     std::string(3, '\0') + "true\x85R.");
  EXPECT_FSDP2_ERROR(load(state, path), kUnsupported, "os.system");
  spill(path / ".metadata", metadata);
  load(state, path);
  EXPECT_TRUE(same(state, simple(5)));
}

TEST(DcpLoad, EveryFlippedByteOfTheMetadataIsAnErrorOrChangesNothing) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  save(simple(5), path);
  const std::string whole = read_file(path / ".metadata");
  for (size_t i = 0; i < whole.size(); i += 2) {
    std::string flipped = whole;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 8)));
    spill_metadata(path, flipped);
    StateDict state = simple(0);
    try {
      load(state, path);
      EXPECT_TRUE(same(state, simple(5))) << "byte " << i;
      Reader(path).read_all();  // names in the paths may differ
    } catch (const Error&) {
    }
  }
}

TEST(DcpValue, CopiesAreIndependentAndGettersSayWhatTheyFound) {
  Value a = StateDict{{"x", 1}};
  StateDict& inside = a.dict();
  const Value b = a;
  inside["x"] = 2;
  EXPECT_EQ(b.dict().at("x").integer(), 1);
  EXPECT_EQ(a.dict()["x"].integer(), 2);
  EXPECT_EQ(Value(true).kind(), Kind::Bool);
  EXPECT_EQ(Value(1).kind(), Kind::Int);
  EXPECT_EQ(Value(1.0f).kind(), Kind::Double);
  EXPECT_EQ(Value("x").kind(), Kind::String);
  EXPECT_EQ(Value(UINT64_MAX).str(), "18446744073709551615");
  EXPECT_EQ(Value::big_int("-00012").integer(), -12);
  EXPECT_FSDP2_ERROR(Value("x").integer(), kInvalidArgument, "String");
  EXPECT_FSDP2_ERROR(StateDict().at("k"), kNotFound, "'k'");
  EXPECT_FSDP2_ERROR(Value(torch::Tensor()), kInvalidArgument, "undefined");
  StateDict dict{{"b", 1}, {"a", 2}};
  EXPECT_EQ(dict.keys(), (std::vector<std::string>{"b", "a"}));
  EXPECT_TRUE(dict.erase("b"));
  EXPECT_FALSE(dict.erase("b"));
  EXPECT_FALSE(dict.contains("b"));
}

}  // namespace
}  // namespace fsdp2::dcp
