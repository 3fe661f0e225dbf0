// labels: peer
// Items (torch.save archives) that Python wrote: every dtype, strides, conj and neg; values there
// and back; damage.

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>
#include <torch/torch.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "dcp/file_writer.h"
#include "dcp/item.h"
#include "dcp/same.h"
#include "dcp/scalar_types.h"
#include "dcp/tensor_item.h"
#include "support/ranks.h"

namespace fsdp2::dcp::detail {
namespace {

using fsdp2::testing::read_file;
using fsdp2::testing::TempDir;

void spill(const std::string& path, const std::string& content) { std::ofstream(path, std::ios::binary) << content; }

ByteRange open_item(const std::string& folder, const std::string& name) {
  auto file = local_storage()->open(folder, name);
  const uint64_t size = file->size();
  return {std::move(file), 0, size, name};
}

at::Tensor read_tensor(const std::string& folder, const std::string& name, at::ScalarType dtype,
                       const std::vector<int64_t>& sizes, bool verify = true) {
  return TensorItem(open_item(folder, name), verify, dtype, sizes).whole();
}

class DcpItem : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempDir();
    const auto python = fsdp2::testing::run_python(fsdp2::testing::test_file("peer/dcp_items.py"), {folder_->path()});
    ASSERT_EQ(python.exit_code, 0) << python.output;
  }
  static void TearDownTestSuite() { delete folder_; }
  static const std::string& folder() { return folder_->path(); }

 private:
  static inline TempDir* folder_ = nullptr;
};

TEST_F(DcpItem, TensorsOfEveryDtypeAndStride) {
  const nlohmann::json entries = nlohmann::json::parse(read_file(folder() + "/items.json"));
  ASSERT_GT(entries.size(), 25u);
  for (const auto& entry : entries) {
    const std::string name = entry["name"];
    const auto sizes = entry["sizes"].get<std::vector<int64_t>>();
    const at::ScalarType dtype = *dtype_from_name(entry["dtype"].get<std::string>());
    const at::Tensor read = read_tensor(folder(), name + ".item", dtype, sizes);
    EXPECT_EQ(read.sizes(), at::IntArrayRef(sizes)) << name;
    EXPECT_EQ(read.scalar_type(), dtype) << name;
    const at::Tensor plain = storable(read, name);
    const std::string raw = read_file(folder() + "/" + name + ".raw");
    ASSERT_EQ(plain.nbytes(), raw.size()) << name;
    EXPECT_EQ(std::memcmp(plain.nbytes() ? plain.data_ptr() : raw.data(), raw.data(), raw.size()), 0) << name;
  }
}

TEST_F(DcpItem, WrongPromisesAreErrors) {
  EXPECT_FSDP2_ERROR(read_tensor(folder(), "contiguous.item", at::kDouble, {4, 6}), kCorruption, "float32");
  EXPECT_FSDP2_ERROR(read_tensor(folder(), "contiguous.item", at::kFloat, {5, 5}), kCorruption, "shape [4, 6]");
  EXPECT_FSDP2_ERROR(read_tensor(folder(), "int.value", at::kFloat, {1}), kCorruption, "holds a int");
}

// Boxes of tensors with every kind of strides, into memory with every kind of strides, cast or not.
TEST_F(DcpItem, PartsAreReadIntoAnyTarget) {
  const nlohmann::json entries = nlohmann::json::parse(read_file(folder() + "/items.json"));
  size_t boxes = 0;
  for (const auto& entry : entries) {
    const std::string name = entry["name"];
    const auto sizes = entry["sizes"].get<std::vector<int64_t>>();
    const at::ScalarType dtype = *dtype_from_name(entry["dtype"].get<std::string>());
    if (sizes.size() != 2 || sizes[0] < 3 || sizes[1] < 3 || c10::isComplexType(dtype)) continue;
    const at::Tensor whole = read_tensor(folder(), name + ".item", dtype, sizes);
    for (const Chunk& box : {Chunk{{1, 0}, {2, sizes[1]}}, Chunk{{1, 1}, {2, 2}}, Chunk{{0, 2}, {sizes[0], 1}}}) {
      const at::Tensor expected =
          whole.narrow(0, box.offsets[0], box.sizes[0]).narrow(1, box.offsets[1], box.sizes[1]).to(at::kDouble);
      for (const bool verify : {true, false}) {
        const at::Tensor same = at::empty(box.sizes, dtype),
                         wide = at::empty({box.sizes[1], box.sizes[0]}, at::kDouble);
        TensorItem item(open_item(folder(), name + ".item"), verify, dtype, sizes);
        item.copy_window(box, same);
        item.copy_window(box, wide.t());
        EXPECT_TRUE(same.to(at::kDouble).equal(expected)) << name;
        EXPECT_TRUE(wide.t().equal(expected)) << name;
        ++boxes;
      }
    }
  }
  EXPECT_GE(boxes, 18u);  // row-major and permuted ones
}

TEST_F(DcpItem, ValuesThereAndBack) {
  using fsdp2::testing::same;
  const std::pair<const char*, Value> expected[] = {
      {"none", nullptr},
      {"int", 7},
      {"long", int64_t{1} << 40},
      {"big", Value::big_int("-1267650600228229401496703205376")},
      {"float", 0.1},
      {"text", "h\xc3\xa9llo"},
      {"bytearray", Value::byte_array(std::string("\x00\xfe", 2))},
      {"complex", Value::complex(1, -2)},
      {"tuple", Value::tuple({1, 2.5, Value::tuple({"x"})})},
      {"set", Value::set({3})},
      {"frozenset", Value::frozen_set({"a"})},
      {"dict", Value::from_items({{"a", 1}, {2, "two"}, {Value::tuple({1, 2}), nullptr}})},
      {"ordered", Value::ordered_dict(StateDict{{"a", 1}, {"b", std::vector<Value>{}}})},
      {"size", Value::size({2, 3})},
      {"dtype", Value::dtype(at::kBFloat16)},
      {"device", Value::device(c10::Device("cuda:1"))},
      {"tensors", Value::tuple({at::ones(2), StateDict{{"t", at::arange(3, at::kFloat)}}})},
      {"bytes", nullptr},
      {"no_bytes", nullptr},
      {"shared", nullptr},
      {"opaque", nullptr},  // looked at below
  };
  for (const auto& [name, value] : expected) {
    const Value read = read_value_item(open_item(folder(), std::string(name) + ".value"), true);
    const bool looked_at_below = value.is_none() && std::string(name) != "none";
    if (!looked_at_below) {
      EXPECT_TRUE(same(read, value, name));
    }
    FileWriter file(local_storage()->create(folder(), std::string(name) + ".back"), /*checksums=*/true);
    write_value_item(file, pickle_value(read, name));
    file.finish();
  }
  const Value bytes = read_value_item(open_item(folder(), "bytes.value"), true);
  ASSERT_EQ(bytes.kind(), Kind::Bytes);
  ASSERT_EQ(bytes.str().size(), 256u);
  for (int i = 0; i < 256; ++i) EXPECT_EQ(static_cast<uint8_t>(bytes.str()[static_cast<size_t>(i)]), i);
  EXPECT_EQ(read_value_item(open_item(folder(), "opaque.value"), true).kind(), Kind::Opaque);
  const auto python = fsdp2::testing::run_python(fsdp2::testing::test_file("peer/dcp_values_back.py"), {folder()});
  EXPECT_EQ(python.exit_code, 0) << python.output;
}

TEST_F(DcpItem, EveryTruncationIsAnError) {
  const std::string whole = read_file(folder() + "/contiguous.item");
  for (size_t length = 0; length < whole.size(); length += 7) {
    spill(folder() + "/cut", whole.substr(0, length));
    EXPECT_THROW(read_tensor(folder(), "cut", at::kFloat, {4, 6}), fsdp2::Error) << length;
  }
}

TEST_F(DcpItem, EveryFlippedByteIsAnErrorOrChangesNothing) {
  const std::string whole = read_file(folder() + "/contiguous.item");
  const at::Tensor expected = at::arange(24, at::kFloat).reshape({4, 6});
  size_t caught = 0;
  for (size_t i = 0; i < whole.size(); i += 3) {
    std::string flipped = whole;
    flipped[i] = static_cast<char>(flipped[i] ^ 0x55);
    spill(folder() + "/flipped", flipped);
    try {
      const at::Tensor read = read_tensor(folder(), "flipped", at::kFloat, {4, 6});
      EXPECT_TRUE(read.equal(expected)) << "byte " << i;
    } catch (const fsdp2::Error&) {
      ++caught;
    }
  }
  EXPECT_GE(caught, 32u);  // the data at least
  // Without verification the same flip in the data goes through.
  std::string flipped = whole;
  const float needle = 13.0f;
  flipped[flipped.find(std::string(reinterpret_cast<const char*>(&needle), 4)) + 3] ^= 1;
  spill(folder() + "/flipped", flipped);
  EXPECT_FSDP2_ERROR(read_tensor(folder(), "flipped", at::kFloat, {4, 6}), kCorruption, "checksum");
  EXPECT_FALSE(read_tensor(folder(), "flipped", at::kFloat, {4, 6}, false).equal(expected));
}

}  // namespace
}  // namespace fsdp2::dcp::detail
