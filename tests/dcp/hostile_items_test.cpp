// Items and folders made by a liar: directories of zip archives that contradict themselves, tensors that are not where
// they say, ranks whose metadata are missing.

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>
#include <torch/torch.h>

#include <cstring>

#include "dcp/item.h"
#include "dcp/metadata_files.h"
#include "dcp/tensor_item.h"
#include "pickle/writer.h"
#include "support/ranks.h"

namespace fsdp2::dcp::detail {
namespace {

class Text final : public ByteSink {
 public:
  uint32_t write(const void* data, size_t size) override {
    text.append(static_cast<const char*>(data), size);
    return 0;  // no checksums: the lies are found without
  }
  uint64_t position() const override { return text.size(); }
  std::string text;
};

/// What the pickle of a tensor says; the defaults are right for 6 floats.
struct Description {
  const char* function = "_rebuild_tensor_v2";
  const char* storage = "FloatStorage";
  std::string key = "0";
  int64_t count = 6, offset = 0;
  std::vector<int64_t> sizes{2, 3}, strides{3, 1};
  std::string flag;
  int arguments = 6;
};

std::string pickled(const Description& description) {
  pickle::Writer out;
  out.global("torch._utils", description.function);
  out.mark();
  out.mark();
  out.text("storage");
  out.global("torch", description.storage);
  out.text(description.key);
  out.text("cpu");
  out.integer(description.count);
  out.tuple();
  out.persistent_id();
  out.integer(description.offset);
  out.integers(description.sizes);
  out.integers(description.strides);
  if (description.arguments > 4) out.boolean(false);
  if (description.arguments > 5) {
    out.global("collections", "OrderedDict");
    out.tuple_of(0);
    out.reduce();
  }
  if (!description.flag.empty()) {
    out.empty_dict();
    out.text(description.flag);
    out.boolean(true);
    out.set_item();
  }
  out.tuple();
  out.reduce();
  return std::move(out).finish();
}

std::string archive(const std::string& pickle, size_t data_bytes = 24) {
  Text out;
  ZipWriter zip(out);
  zip.record("data.pkl", pickle);
  zip.record("byteorder", "little");
  zip.record("data/0", std::string(data_bytes, '\1'));
  zip.record("version", "3\n");
  zip.finish();
  return out.text;
}

at::Tensor read(const std::string& bytes, at::ScalarType dtype = at::kFloat, std::vector<int64_t> sizes = {2, 3}) {
  return TensorItem(ByteRange(bytes, "here/__0_0.distcp (w)"), true, dtype, std::move(sizes)).whole();
}

void expect_refused(const std::string& bytes, const std::string& text) {
  EXPECT_FSDP2_ERROR(read(bytes), kCorruption, text);
  EXPECT_FSDP2_ERROR(read(bytes), kCorruption, "here/__0_0.distcp (w)");
}

TEST(DcpHostileTensors, DescriptionsThatContradictTheData) {
  EXPECT_EQ(read(archive(pickled({}))).numel(), 6);
  const auto lie = [](const std::function<void(Description&)>& change) {
    Description description;
    change(description);
    return archive(pickled(description));
  };
  constexpr int64_t kMost = INT64_MAX;
  expect_refused(lie([](auto& d) { d.strides = {3, 2}; }), "its last element is 7 of 6");
  expect_refused(lie([](auto& d) { d.offset = 1; }), "its last element is 6 of 6");
  expect_refused(lie([](auto& d) { d.offset = -1; }), "do not fit together");
  expect_refused(lie([](auto& d) { d.offset = kMost; }), "its last element");
  expect_refused(lie([](auto& d) { d.strides = {-3, 1}; }), "negative");
  expect_refused(lie([](auto& d) { d.sizes = {2, -3}; }), "negative");
  expect_refused(lie([](auto& d) { d.strides = {kMost, kMost}; }), "its last element");
  expect_refused(lie([](auto& d) { d.sizes = {kMost, kMost}, d.strides = {0, 0}; }), "its last element");
  expect_refused(lie([](auto& d) { d.strides = {3}; }), "do not fit together");
  expect_refused(lie([](auto& d) { d.sizes.assign(65, 1), d.strides.assign(65, 1); }), "65 dimensions");
  expect_refused(lie([](auto& d) { d.count = 7; }), "storage of 7 elements is 24 bytes");
  expect_refused(lie([](auto& d) { d.count = -6; }), "storage of -6 elements");
  expect_refused(lie([](auto& d) { d.count = kMost; }), "storage of 9223372036854775807 elements");
  expect_refused(lie([](auto& d) { d.key = "1"; }), "no record data/1");
  expect_refused(lie([](auto& d) { d.key = "../data.pkl"; }), "no record data/../data.pkl");
  expect_refused(lie([](auto& d) { d.storage = "IntStorage"; }), "dtype is int32, the metadata say float32");
  expect_refused(lie([](auto& d) { d.storage = "EvilStorage"; }), "torch.EvilStorage");
  expect_refused(lie([](auto& d) { d.flag = "conj"; }), "unknown flag conj");
  expect_refused(lie([](auto& d) { d.arguments = 4; }), "4 arguments");
  expect_refused(lie([](auto& d) { d.function = "_rebuild_qtensor"; }), "the metadata say tensor");
  expect_refused(lie([](auto& d) { d.sizes = {3, 2}, d.strides = {2, 1}; }), "[3, 2], the metadata say [2, 3]");
  // Every element shares one stored one: right, and no bigger in memory than it should be.
  EXPECT_EQ(read(lie([](auto& d) { d.count = 6, d.strides = {0, 0}; })).sizes(), (at::IntArrayRef{2, 3}));
  pickle::Writer text;
  text.text("not a tensor");
  expect_refused(archive(std::move(text).finish()), "holds a str");
  // Texts where numbers should be: the pickle's reader knows of no file.
  pickle::Writer odd;
  odd.global("torch._utils", "_rebuild_tensor_v2");
  odd.mark();
  for (int i = 0; i < 6; ++i) odd.text("x");
  odd.tuple();
  odd.reduce();
  const std::string bytes = archive(std::move(odd).finish());
  expect_refused(bytes, "found a str where a int is expected");
  EXPECT_FSDP2_ERROR(read_value_item(ByteRange(bytes, "here (w)"), true), kCorruption, "here (w)");
}

template <class T>
void put(std::string& bytes, size_t at, T value) {
  ASSERT_LE(at + sizeof(T), bytes.size());
  std::memcpy(bytes.data() + at, &value, sizeof(T));
}

/// Where the directory's entry of a record begins.
size_t entry_of(const std::string& bytes, const std::string& name) { return bytes.rfind("archive/" + name) - 46; }

TEST(DcpHostileArchives, DirectoriesThatContradictThemselves) {
  const std::string good = archive(pickled({}));
  const auto lie = [&](const std::function<void(std::string&)>& change) {
    std::string bytes = good;
    change(bytes);
    return bytes;
  };
  const size_t data = entry_of(good, "data/0"), end = good.size() - 22, end64 = end - 20 - 56;
  expect_refused(lie([&](auto& bytes) { put<uint16_t>(bytes, data + 10, 8); }), "data/0 is compressed (method 8");
  expect_refused(lie([&](auto& bytes) { put<uint32_t>(bytes, data + 24, 1 << 30); }), "24 of 1073741824 bytes");
  expect_refused(lie([&](auto& bytes) {
                   put<uint32_t>(bytes, data + 20, 1 << 30);
                   put<uint32_t>(bytes, data + 24, 1 << 30);
                 }),
                 "leaves the item");
  expect_refused(lie([&](auto& bytes) { put<uint32_t>(bytes, data + 42, 0xFFFFFF); }), "leaves the item");
  expect_refused(lie([&](auto& bytes) { put<uint32_t>(bytes, data + 42, 1); }), "no header of archive/data/0 at 1");
  expect_refused(lie([&](auto& bytes) { put<uint32_t>(bytes, data + 16, 12345); }), "checksum of archive/data/0");
  expect_refused(lie([&](auto& bytes) { put<uint16_t>(bytes, data + 28, 0xFFFF); }), "ends within record");
  expect_refused(lie([&](auto& bytes) { std::memcpy(&bytes[data + 46], "archive/versio", 14); }), "no record data/0");
  expect_refused(lie([&](auto& bytes) { bytes[data + 46] = 'X'; }), "outside of archive/");
  expect_refused(lie([&](auto& bytes) { bytes[data] = 'X'; }), "directory is damaged");
  expect_refused(lie([&](auto& bytes) { put<uint64_t>(bytes, end64 + 32, uint64_t{1} << 60); }), "records");
  expect_refused(lie([&](auto& bytes) { put<uint64_t>(bytes, end64 + 40, UINT64_MAX); }), "leaves the");
  expect_refused(lie([&](auto& bytes) { put<uint64_t>(bytes, end64 + 48, UINT64_MAX); }), "leaves the");
  expect_refused(lie([&](auto& bytes) { put<uint64_t>(bytes, end64 + 48, 0); }), "directory");
  expect_refused(lie([&](auto& bytes) { put<uint64_t>(bytes, end - 20 + 8, UINT64_MAX - 10); }), "zip64 end record");
  expect_refused(lie([&](auto& bytes) { put<uint64_t>(bytes, end - 20 + 8, 0); }), "no zip64 end record at 0");
  expect_refused(lie([&](auto& bytes) { bytes[end] = 'X'; }), "no end record");
  Text twice;
  ZipWriter zip(twice);
  zip.record("data.pkl", pickled({}));
  zip.record("data/0", std::string(24, 'a'));
  zip.record("data/0", std::string(24, 'b'));
  zip.finish();
  expect_refused(twice.text, "archive/data/0 is there twice");
  for (size_t length = 0; length < good.size(); ++length) EXPECT_THROW(read(good.substr(0, length)), Error) << length;
}

TEST(DcpHostileArchives, EveryFlippedBitOfAnItemIsHandled) {
  const std::string good = archive(pickled({}));
  for (size_t bit = 0; bit < 8 * good.size(); ++bit) {
    std::string bytes = good;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    try {
      EXPECT_EQ(read(bytes).numel(), 6);
      read_value_item(ByteRange(bytes, "w"), true);
    } catch (const Error&) {
    }
  }
}

void put_file(Storage& storage, const std::string& place, const std::string& name, const std::string& content) {
  const auto file = storage.create(place, name);
  file->write(content.data(), content.size());
  file->finish();
}

TEST(DcpRankLocalMetadata, FoldersWithGapsAndLeftovers) {
  const auto storage = make_memory_storage();
  const auto make = [&](const std::string& target, const std::vector<std::pair<std::string, std::string>>& files) {
    const std::string place = storage->begin(target, false);
    for (const auto& [name, content] : files) put_file(*storage, place, name, content);
    storage->commit(place, target, false);
  };
  const auto rank = [](int64_t first) {
    StoredMetadata stored;
    stored.metadata.entries.emplace_back("w", TensorEntry{at::kFloat, {4}, {{{first}, {2}}}});
    stored.locations.push_back({{"__0_0.distcp", 0, 8, true}});
    return encode_metadata(stored);
  };
  make("/whole",
       {{"__0.metadata", rank(0)}, {"__1.metadata", rank(2)}, {"__1.metadata.tmp", "x"}, {"__x.metadata", "x"}});
  const StoredMetadata whole = read_metadata(*storage, "/whole");
  EXPECT_EQ(std::get<TensorEntry>(whole.metadata.entries.at(0).second).chunks.size(), 2u);
  make("/gap", {{"__0.metadata", rank(0)}, {"__2.metadata", rank(2)}});
  EXPECT_FSDP2_ERROR(read_metadata(*storage, "/gap"), kCorruption, "not of rank 1");
  make("/late", {{"__1.metadata", rank(2)}});
  EXPECT_FSDP2_ERROR(read_metadata(*storage, "/late"), kCorruption, "not of rank 0");
  make("/died", {{".metadata.tmp", rank(0)}, {"__0_0.distcp", "x"}});
  EXPECT_FSDP2_ERROR(read_metadata(*storage, "/died"), kNotFound, "only .metadata.tmp");
  make("/damaged", {{"__0.metadata", rank(0)}, {"__1.metadata", rank(2).substr(0, 50)}});
  EXPECT_FSDP2_ERROR(read_metadata(*storage, "/damaged"), kCorruption, "/damaged/__1.metadata");
  EXPECT_FSDP2_ERROR(read_metadata(*storage, "/nothing"), kNotFound, "no checkpoint");
}

}  // namespace
}  // namespace fsdp2::dcp::detail
