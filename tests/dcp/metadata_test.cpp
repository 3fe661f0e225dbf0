// labels: peer
// Metadata as every release of PyTorch and Python pickled them, those of ranks that saved alone, and lies in them.

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>

#include <algorithm>
#include <filesystem>

#include "dcp/stored_metadata.h"
#include "pickle/writer.h"
#include "support/ranks.h"

namespace fsdp2::dcp::detail {
namespace {

using fsdp2::testing::read_file;
using fsdp2::testing::run_python;
using fsdp2::testing::TempDir;
using fsdp2::testing::test_file;

const TensorEntry& tensor(const StoredMetadata& stored, const std::string& fqn) {
  return std::get<TensorEntry>(stored.metadata.entries.at(stored.find(fqn)).second);
}
const ItemLocation& place(const StoredMetadata& stored, const std::string& fqn, size_t chunk = 0) {
  return stored.locations.at(stored.find(fqn)).at(chunk);
}

/// What tests/peer/dcp_releases.py says about its one checkpoint.
void expect_the_checkpoint(const StoredMetadata& stored, bool with_paths) {
  ASSERT_EQ(stored.metadata.entries.size(), 4u);
  const TensorEntry& weight = tensor(stored, "layer.weight");
  EXPECT_EQ(weight.dtype, at::kFloat);
  EXPECT_EQ(weight.sizes, (std::vector<int64_t>{4, 3}));
  ASSERT_EQ(weight.chunks.size(), 2u);
  EXPECT_EQ(weight.chunks[0].offsets, (std::vector<int64_t>{2, 0}));
  EXPECT_EQ(weight.chunks[1].sizes, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(place(stored, "layer.weight", 0).file, "__1_0.distcp");
  EXPECT_EQ(place(stored, "layer.weight", 1).offset, 5000000000u);
  EXPECT_EQ(place(stored, "layer.weight", 1).length, 1261u);
  EXPECT_EQ(tensor(stored, "step").dtype, at::kLong);
  EXPECT_TRUE(tensor(stored, "step").sizes.empty());
  EXPECT_EQ(place(stored, "step").file, "__0_1.distcp");
  EXPECT_EQ(tensor(stored, "half").dtype, at::kBFloat16);
  EXPECT_EQ(place(stored, "extra.ä").length, 8u);
  EXPECT_TRUE(std::holds_alternative<BytesEntry>(stored.metadata.entries[stored.find("extra.ä")].second));
  for (const auto& places : stored.locations) {
    for (const ItemLocation& location : places) EXPECT_TRUE(location.present && location.transforms.empty());
  }
  EXPECT_EQ(stored.metadata.paths.size(), with_paths ? 4u : 0u);
  if (with_paths) {
    EXPECT_EQ(std::get<int64_t>(stored.metadata.paths.at("extra.ä").at(1)), 0);
  }
}

class DcpMetadata : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<TempDir>();
    const auto python = run_python(test_file("peer/dcp_releases.py"), {folder_->path()});
    ASSERT_EQ(python.exit_code, 0) << python.output;
  }
  static void TearDownTestSuite() { folder_.reset(); }
  static std::string file(const std::string& name) { return read_file(folder_->path() + "/" + name); }

  static std::unique_ptr<TempDir> folder_;
};
std::unique_ptr<TempDir> DcpMetadata::folder_;

TEST_F(DcpMetadata, EveryReleaseAndProtocol) {
  size_t read = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_->path())) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("evil") || name.starts_with("quantized")) continue;
    SCOPED_TRACE(name);
    const StoredMetadata stored = decode_metadata(file(name), name);
    expect_the_checkpoint(stored, !name.starts_with("not_flattened"));
    EXPECT_TRUE(stored.foreign);
    ++read;
  }
  EXPECT_EQ(read, 12u * 4u);
}

TEST_F(DcpMetadata, OwnWritingSaysTheSame) {
  StoredMetadata stored = decode_metadata(file("torch_2_9.4"), "python");
  stored.locations[0][0].transforms = {"stream.zstd/1"};
  const StoredMetadata again = decode_metadata(encode_metadata(stored), "own");
  EXPECT_EQ(again.locations[0][0].transforms, stored.locations[0][0].transforms);
  stored = again;
  stored.locations[0][0].transforms.clear();
  expect_the_checkpoint(stored, true);
  EXPECT_FALSE(again.foreign);
}

TEST_F(DcpMetadata, GlobalsThatNoCheckpointNeedsAreNamed) {
  EXPECT_FSDP2_ERROR(decode_metadata(file("evil_call.4"), "f"), kUnsupported, "posix.system");
  EXPECT_FSDP2_ERROR(decode_metadata(file("evil_getattr.4"), "f"), kUnsupported, "getattr");
  EXPECT_FSDP2_ERROR(decode_metadata(file("evil_field.4"), "f"), kUnsupported, "getattr");
  EXPECT_FSDP2_ERROR(decode_metadata(file("quantized.4"), "f"), kUnsupported, "half has the dtype torch.qint8");
}

TEST_F(DcpMetadata, EveryTruncationIsAnErrorAndEveryFlipIsHandled) {
  const std::string whole = file("torch_2_9.4");
  for (size_t length = 0; length < whole.size(); length += 3)
    EXPECT_THROW(decode_metadata(whole.substr(0, length), "cut"), Error) << length;
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string flipped = whole;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 8)));
    try {
      decode_metadata(flipped, "flipped");
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("flipped"), std::string::npos) << error.what();
    }
  }
}

StoredMetadata made(const std::string& file, std::vector<std::pair<std::string, std::vector<Chunk>>> tensors,
                    const std::vector<int64_t>& sizes = {4, 2}, at::ScalarType dtype = at::kFloat) {
  StoredMetadata stored;
  for (auto& [fqn, chunks] : tensors) {
    stored.locations.emplace_back(chunks.size(), ItemLocation{file, stored.locations.size() * 100, 100, true});
    stored.metadata.entries.emplace_back(fqn, TensorEntry{dtype, sizes, std::move(chunks)});
    stored.metadata.paths[fqn] = {fqn};
  }
  stored.index();
  return stored;
}

const Chunk kWhole{{0, 0}, {4, 2}}, kTop{{0, 0}, {2, 2}}, kBottom{{2, 0}, {2, 2}}, kNothing{{4, 0}, {0, 2}};

TEST(DcpMergedMetadata, ChunksAreUnitedAndReplicasCountOnce) {
  StoredMetadata first = made("__0_0.distcp", {{"cut", {kTop}}, {"same", {kWhole}}});
  StoredMetadata second = made("__1_0.distcp", {{"same", {kWhole}}, {"cut", {kBottom}}, {"own", {kWhole}}});
  StoredMetadata third = made("__2_0.distcp", {{"cut", {kNothing}}, {"same", {kWhole}}});
  first.metadata.entries.emplace_back("value", BytesEntry{});
  first.locations.push_back({{"__0_0.distcp", 9, 9, true}});
  third.metadata.entries.emplace_back("value", BytesEntry{});
  third.locations.push_back({{"__2_0.distcp", 9, 9, true}});
  const StoredMetadata merged = merge_metadata({first, second, third}, {"a", "b", "c"});
  ASSERT_EQ(merged.metadata.entries.size(), 4u);
  EXPECT_EQ(tensor(merged, "same").chunks.size(), 1u);
  EXPECT_EQ(place(merged, "same").file, "__0_0.distcp");
  ASSERT_EQ(tensor(merged, "cut").chunks.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(tensor(merged, "cut").chunks[i].offsets[0], static_cast<int64_t>(2 * i));
    EXPECT_EQ(place(merged, "cut", i).file, "__" + std::to_string(i) + "_0.distcp");
  }
  EXPECT_EQ(place(merged, "own").file, "__1_0.distcp");
  EXPECT_EQ(place(merged, "value").file, "__0_0.distcp");
  EXPECT_EQ(merged.metadata.paths.size(), 3u);
}

TEST(DcpMergedMetadata, ContradictionsNameBothFiles) {
  const auto merge = [](const StoredMetadata& second) {
    merge_metadata({made("x", {{"w", {kTop}}}), second}, {"here/__0.metadata", "here/__1.metadata"});
  };
  const auto expect_both = [&](const StoredMetadata& second, const std::string& text) {
    EXPECT_FSDP2_ERROR(merge(second), kCorruption, text);
    EXPECT_FSDP2_ERROR(merge(second), kCorruption, "here/__0.metadata");
    EXPECT_FSDP2_ERROR(merge(second), kCorruption, "here/__1.metadata");
  };
  expect_both(made("x", {{"w", {kBottom}}}, {4, 2}, at::kDouble), "w is float32");
  expect_both(made("x", {{"w", {{{0, 0}, {2, 3}}}}}, {4, 3}), "of shape [4, 2]");
  expect_both(made("x", {{"w", {{{0, 0}, {1, 2}}}}}), "at [0, 0] of size [2, 2]");
  StoredMetadata value;
  value.metadata.entries.emplace_back("w", BytesEntry{});
  value.locations.emplace_back(1);
  expect_both(value, "w is a tensor");
}

/// Metadata as a liar would pickle them: `entries` and `places` write the inside of the dicts.
std::string pickled(const std::function<void(pickle::Writer&)>& entries,
                    const std::function<void(pickle::Writer&)>& places) {
  pickle::Writer out;
  const auto dict = [&](const char* name, const std::function<void(pickle::Writer&)>& content) {
    out.name(name);
    out.empty_dict();
    out.mark();
    content(out);
    out.set_items();
  };
  out.global("torch.distributed.checkpoint.metadata", "Metadata");
  out.tuple_of(0);
  out.new_object();
  out.empty_dict();
  out.mark();
  dict("state_dict_metadata", entries);
  dict("storage_data", places);
  out.set_items();
  out.build();
  return std::move(out).finish();
}

TEST(DcpLies, SharedObjectsDoNotFillTheMemory) {
  // One key of a megabyte, named again and again; and one shape of 64 dimensions for a hundred thousand chunks.
  const std::string module = "torch.distributed.checkpoint.metadata";
  const std::string names = pickled(
      [&](pickle::Writer& out) {
        out.text(std::string(1 << 20, 'k'));
        const uint32_t key = out.memoize();
        out.global(module, "BytesStorageMetadata");
        out.tuple_of(0);
        out.new_object();
        const uint32_t value = out.memoize();
        for (int i = 0; i < 100000; ++i) {
          out.remember(key);
          out.remember(value);
        }
      },
      [](pickle::Writer&) {});
  EXPECT_FSDP2_ERROR(decode_metadata(names, "bomb"), kCorruption, "out of all proportion");
  const std::string shapes = pickled(
      [&](pickle::Writer& out) {
        const auto record = [&](const char* name) {
          out.global(module, name);
          out.tuple_of(0);
          out.new_object();
          out.empty_dict();
          out.mark();
        };
        out.name("w");
        record("TensorStorageMetadata");
        out.name("properties");
        out.global(module, "TensorProperties");
        out.tuple_of(0);
        out.new_object();
        out.global("torch", "float32");
        out.tuple_of(1);
        out.build();
        out.name("size");
        out.integers(std::vector<int64_t>(64, 1));
        const uint32_t size = out.memoize();
        out.name("chunks");
        out.empty_list();
        out.mark();
        record("ChunkStorageMetadata");
        out.name("sizes");
        out.remember(size);
        out.name("offsets");
        out.integers(std::vector<int64_t>(64, 0));
        out.set_items();
        out.build();
        const uint32_t chunk = out.memoize();
        for (int i = 0; i < 1000000; ++i) out.remember(chunk);
        out.appends();
        out.set_items();
        out.build();
      },
      [](pickle::Writer&) {});
  EXPECT_FSDP2_ERROR(decode_metadata(shapes, "bomb"), kCorruption, "out of all proportion");
}

TEST(DcpLies, ATensorInManyPartsIsQuick) {
  constexpr int64_t kParts = 100000;
  StoredMetadata stored;
  TensorEntry entry{at::kFloat, {kParts, 2}, {}};
  std::vector<ItemLocation> places;
  for (int64_t i = 0; i < kParts; ++i) {
    entry.chunks.push_back({{kParts - 1 - i, 0}, {1, 2}});
    places.push_back({"__0_0.distcp", static_cast<uint64_t>(i), 1, true});
  }
  stored.metadata.entries.emplace_back("w", entry);
  stored.locations.push_back(places);
  const StoredMetadata again = decode_metadata(encode_metadata(stored), "parts");
  for (size_t i = 0; i < static_cast<size_t>(kParts); i += 999) EXPECT_EQ(again.locations[0][i].offset, i);
}

TEST(DcpLies, WhatOneFileSaysTwiceOrWrongly) {
  const auto lie = [](const std::function<void(StoredMetadata&)>& change) {
    StoredMetadata stored = made("__0_0.distcp", {{"w", {kTop, kBottom}}, {"v", {kWhole}}});
    change(stored);
    return encode_metadata(stored);
  };
  const auto expect = [&](const std::function<void(StoredMetadata&)>& change, const std::string& text) {
    EXPECT_FSDP2_ERROR(decode_metadata(lie(change), "here/.metadata"), kCorruption, text);
    EXPECT_FSDP2_ERROR(decode_metadata(lie(change), "here/.metadata"), kCorruption, "here/.metadata");
  };
  const auto weight = [](StoredMetadata& stored) -> TensorEntry& {
    return std::get<TensorEntry>(stored.metadata.entries[0].second);
  };
  const auto twice = [](StoredMetadata& stored) {
    stored.metadata.entries[1].first = "w";  // with a chunk of its own
    stored.index();
  };
  expect(twice, "the key w is there twice");
  expect([&](auto& stored) { weight(stored).sizes = {int64_t{1} << 62, 4}; }, "impossible shape");
  expect([&](auto& stored) { weight(stored).sizes = {4, -2}; }, "impossible shape");
  expect([&](auto& stored) { weight(stored).chunks[1].offsets = {INT64_MAX, 0}; }, "leaves the tensor");
  expect([&](auto& stored) { weight(stored).chunks[1].sizes = {INT64_MAX, 2}; }, "leaves the tensor");
  expect([&](auto& stored) { weight(stored).chunks[1].sizes = {2}; }, "1 sizes");
  expect([&](auto& stored) { weight(stored).sizes.assign(65, 1); }, "65 dimensions");
  expect([&](auto& stored) { stored.locations[0][1].offset = uint64_t{1} << 63; }, "w lies at offset -");
  expect([&](auto& stored) { stored.locations[0][1].length = UINT64_MAX; }, "with length -1");
  for (const char* name : {"", ".", "..", "a/b", "/etc/passwd", "a\\b"})
    expect([&](auto& stored) { stored.locations[0][1].file = name; }, "not a plain file name");
  expect([&](auto& stored) { stored.locations[0][1].file = std::string(256, 'x'); }, "not a plain file name");
  expect([&](auto& stored) { stored.locations[0][1].transforms.assign(17, "t/1"); }, "17 transforms");
  expect([&](auto& stored) { stored.metadata.paths["w"] = {int64_t{1} << 40}; }, "at place 1099511627776");
  expect([&](auto& stored) { stored.metadata.paths["w"] = {int64_t{-1}}; }, "at place -1");
}

}  // namespace
}  // namespace fsdp2::dcp::detail
