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

#include "dcp/item.h"
#include "dcp/same.h"
#include "dcp/scalar_types.h"
#include "support/ranks.h"

namespace fsdp2::dcp::detail {
namespace {

using fsdp2::testing::read_file;
using fsdp2::testing::TempDir;

void spill(const std::string& path, const std::string& content) { std::ofstream(path, std::ios::binary) << content; }

ByteRange open_item(const std::string& folder, const std::string& name) {
  auto file = std::make_shared<FileReader>(folder, name);
  const uint64_t size = file->size();
  return {std::move(file), 0, size, name};
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
    const at::Tensor read =
        read_tensor_item(open_item(folder(), name + ".item"), true, dtype, c10::multiply_integers(sizes));
    EXPECT_EQ(read.sizes(), at::IntArrayRef(sizes)) << name;
    EXPECT_EQ(read.scalar_type(), dtype) << name;
    const at::Tensor plain = storable(read, name);
    const std::string raw = read_file(folder() + "/" + name + ".raw");
    ASSERT_EQ(plain.nbytes(), raw.size()) << name;
    EXPECT_EQ(std::memcmp(plain.nbytes() ? plain.data_ptr() : raw.data(), raw.data(), raw.size()), 0) << name;
  }
}

TEST_F(DcpItem, WrongPromisesAreErrors) {
  EXPECT_FSDP2_ERROR(read_tensor_item(open_item(folder(), "contiguous.item"), true, at::kDouble, 24), kCorruption,
                     "float32");
  EXPECT_FSDP2_ERROR(read_tensor_item(open_item(folder(), "contiguous.item"), true, at::kFloat, 25), kCorruption,
                     "24 elements");
  EXPECT_FSDP2_ERROR(read_tensor_item(open_item(folder(), "int.value"), true, at::kFloat, 1), kCorruption,
                     "holds a int");
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
    FileWriter file(folder() + "/" + name + ".back");
    write_value_item(file, pickle_value(read, name), true);
    file.close();
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
    EXPECT_THROW(read_tensor_item(open_item(folder(), "cut"), true, at::kFloat, 24), fsdp2::Error) << length;
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
      const at::Tensor read = read_tensor_item(open_item(folder(), "flipped"), true, at::kFloat, 24);
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
  EXPECT_FSDP2_ERROR(read_tensor_item(open_item(folder(), "flipped"), true, at::kFloat, 24), kCorruption, "checksum");
  EXPECT_FALSE(read_tensor_item(open_item(folder(), "flipped"), false, at::kFloat, 24).equal(expected));
}

}  // namespace
}  // namespace fsdp2::dcp::detail
