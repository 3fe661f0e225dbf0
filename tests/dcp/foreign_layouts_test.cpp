// labels: peer, ranks
// timeout: 600
// Every layout that Python's writers make: several files per rank, one per item, metadata of each rank, zstd,
// safetensors; and those that it can read, there and back.

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>
#include <fsdp2/tensor/dtensor.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>

#include "dcp/same.h"
#include "dcp/stored_metadata.h"
#include "dcp/transforms.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;
using dcp::StateDict;
using dcp::Value;
using torch::Tensor;

Tensor count(std::vector<int64_t> sizes, at::ScalarType dtype) {
  int64_t numel = 1;
  for (int64_t size : sizes) numel *= size;
  return torch::arange(numel).to(dtype).reshape(sizes);
}

/// The state of tests/peer/dcp_layouts.py; sharded over `mesh` where there is one.
StateDict state(const DeviceMesh* mesh, bool values) {
  const auto full = [&](const Tensor& tensor) { return values ? tensor : torch::zeros_like(tensor); };
  const auto cut = [&](const Tensor& tensor, int64_t dim = 0) {
    return mesh ? Value(distribute_tensor(full(tensor), *mesh, {Shard{dim}}).tensor()) : Value(full(tensor));
  };
  StateDict model;
  model["weight"] = cut(count({7, 5}, torch::kFloat));
  model["columns"] = cut(count({3, 8}, torch::kBFloat16), 1);
  model["one_row"] = cut(count({1, 8}, torch::kLong));
  model["zeros"] = cut(torch::zeros({512, 256}));
  StateDict result;
  result["model"] = model;
  result["plain"] = full(count({6}, torch::kDouble));
  result["step"] = full(torch::tensor(12.0f));
  result["lr"] = values ? Value(0.25) : Value(nullptr);
  result["names"] = values ? Value(std::vector<Value>{"a", "b"}) : Value(nullptr);
  return result;
}

const char* const kLayouts[] = {
    "default",    "three_files", "file_per_item", "rank_local",        "rank_local_files", "zstd",
    "zstd_twice", "zstd_files",  "safetensors",   "safetensors_files", "safetensors_alone"};

class DcpForeignLayouts : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<TempDir>();
    const auto python = run_python_ranks(2, "peer/dcp_layouts.py", {folder_->path()}, std::chrono::seconds(300));
    ASSERT_EQ(python.exit_code, 0) << python.output;
  }
  static void TearDownTestSuite() { folder_.reset(); }
  static fs::path at(const std::string& name) { return fs::path(folder_->path()) / name; }

  static std::unique_ptr<TempDir> folder_;
};
std::unique_ptr<TempDir> DcpForeignLayouts::folder_;

TEST_F(DcpForeignLayouts, EveryOneIsReadByOneAndByThreeRanks) {
  ASSERT_TRUE(run_ranks(3, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {3});
    for (const std::string name : kLayouts) {
      const auto expected = [&](const DeviceMesh* over, bool values) {
        StateDict result = state(over, values);
        if (name == "safetensors_alone") {
          for (const char* key : {"step", "lr", "names"}) result.erase(key);
        }
        return result;
      };
      if (rank == 0) {
        EXPECT_TRUE(same(dcp::Reader(at(name)).read_all(), expected(nullptr, true))) << name;
      }
      StateDict loaded = expected(&mesh, false);
      const auto report = dcp::load(loaded, at(name));
      EXPECT_TRUE(same(loaded, expected(&mesh, true))) << name;
      EXPECT_TRUE(report.unexpected.empty() && report.missing.empty());
      if (rank != 0) continue;
      const auto verified = dcp::verify(at(name));
      EXPECT_TRUE(verified.ok()) << name << ": " << verified.faults.at(0).text;
      EXPECT_TRUE(verified.unreferenced.empty()) << name << ": " << verified.unreferenced.at(0);
    }
  }));
}

struct Layout {
  const char* name;
  dcp::SaveOptions options;
};
std::vector<Layout> own_layouts() {
  std::vector<Layout> result;
  const auto add = [&](const char* name, auto change) {
    result.push_back({name, {}});
    change(result.back().options);
  };
  add("files", [](auto& options) { options.files_per_rank = 3; });
  add("per_item", [](auto& options) { options.file_per_item = true; });
  add("zstd", [](auto& options) { options.zstd = true; });
  add("zstd_no_sums", [](auto& options) { options.zstd = true, options.checksums = false; });
  add("rank_local_own", [](auto& options) { options.rank_local_metadata = true; });
  add("rank_local_zstd", [](auto& options) { options.rank_local_metadata = options.zstd = true; });
  add("blob", [](auto& options) { options.safetensors = true; });
  add("blob_files", [](auto& options) { options.safetensors = true, options.files_per_rank = 2; });
  add("blob_per_item", [](auto& options) { options.safetensors = options.file_per_item = true; });
  return result;
}

TEST(DcpOwnLayouts, ThereAndBack) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {2});
    for (const Layout& layout : own_layouts()) {
      const fs::path path = fs::path(folder.path()) / layout.name;
      dcp::save(state(&mesh, true), path, layout.options);
      StateDict loaded = state(&mesh, false);
      dcp::load(loaded, path);
      EXPECT_TRUE(same(loaded, state(&mesh, true))) << layout.name;
      if (rank != 0) continue;
      EXPECT_TRUE(same(dcp::Reader(path).read_all(), state(nullptr, true))) << layout.name;
      const auto verified = dcp::verify(path);
      EXPECT_TRUE(verified.ok()) << layout.name << ": " << verified.faults.at(0).text;
      EXPECT_TRUE(verified.unreferenced.empty()) << layout.name << ": " << verified.unreferenced.at(0);
    }
  }));
  std::vector<std::string> arguments{folder.path(), "back"};
  for (const Layout& layout : own_layouts()) {
    if (!layout.options.safetensors) arguments.emplace_back(layout.name);  // which Python cannot read
  }
  const auto python = run_python_ranks(2, "peer/dcp_layouts.py", arguments, std::chrono::seconds(300));
  EXPECT_EQ(python.exit_code, 0) << python.output;
  const auto size = [&](const char* name) { return fs::file_size(fs::path(folder.path()) / name / "__0_0.distcp"); };
  EXPECT_LT(size("zstd"), 20000u) << "256 KiB of zeros";
  EXPECT_GT(size("blob"), 256u << 10);
}

/// A checkpoint of one process; `damage` gets the bytes of its only data file.
void expect_caught(const dcp::SaveOptions& options, const std::function<void(std::string&)>& damage,
                   const std::string& text) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  dcp::SaveOptions without_sums = options;
  without_sums.checksums = false;
  dcp::save(StateDict{{"w", torch::arange(6000, torch::kFloat)}}, path, without_sums);
  const std::string file = (path / "__0_0.distcp").string();
  std::string bytes = read_file(file);
  damage(bytes);
  std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
  EXPECT_FSDP2_ERROR(dcp::Reader(path).read("w"), kCorruption, text);
  EXPECT_FSDP2_ERROR(dcp::Reader(path).read("w"), kCorruption, "__0_0.distcp");
  const auto report = dcp::verify(path);
  EXPECT_FALSE(report.ok());
}

TEST(DcpOwnLayouts, DamageOfCompressedItemsAndBlobsIsCaught) {
  dcp::SaveOptions zstd, blob;
  zstd.zstd = blob.safetensors = true;
  expect_caught(
      zstd, [](std::string& bytes) { bytes.resize(bytes.size() - 1); }, "it was cut");
  expect_caught(
      zstd, [](std::string& bytes) { bytes[bytes.size() / 2] ^= 1; }, "w");
  expect_caught(
      zstd, [](std::string& bytes) { bytes[0] ^= 1; }, "zstd data are damaged");
  expect_caught(
      blob, [](std::string& bytes) { bytes.resize(bytes.size() - 1); }, "w");
  expect_caught(
      blob, [](std::string& bytes) { bytes[bytes.find("6000") + 3] = '1'; }, "w");
  expect_caught(
      blob, [](std::string& bytes) { bytes[bytes.find("F32")] = 'I'; }, "w");
  expect_caught(
      blob, [](std::string& bytes) { bytes[bytes.find("\"w\"") + 1] = 'v'; }, "no tensor of that name");
}

TEST(DcpOwnLayouts, OptionsThatExcludeEachOtherAndKeysTwiceInAFile) {
  const TempDir folder;
  dcp::SaveOptions both;
  both.zstd = both.safetensors = true;
  EXPECT_FSDP2_ERROR(dcp::save({}, folder.path() + "/x", both), kInvalidArgument, "exclude each other");
  dcp::SaveOptions blob;
  blob.safetensors = true;
  EXPECT_FSDP2_ERROR(dcp::save({{"c", torch::zeros({2}, torch::kComplexDouble)}}, folder.path() + "/y", blob),
                     kUnsupported, "c");
  EXPECT_FSDP2_ERROR(dcp::save({{"\xff", torch::zeros({2})}}, folder.path() + "/z", blob), kInvalidArgument, "UTF-8");
}

using namespace dcp::detail;  // NOLINT

class Text final : public ByteSink {
 public:
  uint32_t write(const void* data, size_t size) override {
    text.append(static_cast<const char*>(data), size);
    return 0;
  }
  uint64_t position() const override { return text.size(); }
  std::string text;
};

std::string compressed(const std::string& content) {
  Text out;
  ZstdSink sink(out);
  for (size_t at = 0; at < content.size(); at += 1000)
    sink.write(content.data() + at, std::min<size_t>(1000, content.size() - at));
  EXPECT_EQ(sink.position(), content.size());
  sink.finish();
  return out.text;
}

ByteRange undone(const std::string& bytes, uint64_t most, std::vector<std::string> transforms = {kZstdTransform}) {
  return undo_transforms(ByteRange(bytes, "here/__0_0.distcp (w)"), transforms, most);
}

TEST(DcpTransforms, BoundsHoldToTheByte) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{999}, size_t{262144}, size_t{3000000}}) {
    const std::string content(size, 'z'), frame = compressed(content);
    EXPECT_EQ(undone(frame, size).read_text(0, size), content) << size;
    EXPECT_EQ(undone(frame, UINT64_MAX).size(), size);
    if (size > 0) {
      EXPECT_FSDP2_ERROR(undone(frame, size - 1), kCorruption, "become more than");
    }
    for (const size_t cut : {size_t{0}, frame.size() / 2, frame.size() - 1})
      EXPECT_FSDP2_ERROR(undone(frame.substr(0, cut), size), kCorruption, "__0_0.distcp (w)");
  }
  EXPECT_FSDP2_ERROR(undone(compressed("abc") + "tail", 100), kCorruption, "damaged near offset");
  EXPECT_EQ(undone(compressed(compressed("abc")), 3, {kZstdTransform, kZstdTransform}).read_text(0, 3), "abc");
  EXPECT_EQ(undone(compressed("abc"), 3, {"stream.zstd/1.7"}).size(), 3u);
  for (const char* name : {"stream.zstd/2", "stream.zstd", "stream.lz4/1", "", "acme.crypt@example/1"})
    EXPECT_FSDP2_ERROR(undone(compressed("abc"), 3, {name}), kUnsupported, std::string("'") + name + "'");
  // A gigabyte that is not there.
  const std::string bomb = compressed(std::string(size_t{64} << 20, '\0'));
  EXPECT_LT(bomb.size(), 10000u);
  EXPECT_FSDP2_ERROR(undone(bomb, 1 << 20), kCorruption, "become more than the 1048576");
  EXPECT_LE(uint64_t{64} << 20, most_undone_bytes(bomb.size(), {kZstdTransform}));
  EXPECT_EQ(most_undone_bytes(7, {}), 7u);
  EXPECT_EQ(most_undone_bytes(UINT64_MAX / 2, {kZstdTransform}), UINT64_MAX);
}

}  // namespace
}  // namespace fsdp2::testing
