// labels: peer
// The safetensors header: what the library of that name writes and reads, and every lie that a header can tell.

#include <fsdp2/dcp/storage.h>
#include <fsdp2/error.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "dcp/safetensors.h"
#include "support/ranks.h"

namespace fsdp2::dcp::detail {
namespace {

using fsdp2::testing::read_file;
using fsdp2::testing::run_python;
using fsdp2::testing::TempDir;
using fsdp2::testing::test_file;

/// A blob in memory: header text with its length before it, and `data` bytes of 7.
std::string blob(const std::string& header, size_t data) {
  const uint64_t length = header.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + header + std::string(data, 7);
}

SafetensorsHeader read(const std::string& content) { return read_safetensors_header(ByteRange(content, "blob")); }

/// As tensors() in safetensors_peer.py.
std::string bytes_of(at::ScalarType type) {
  std::string out(6 * c10::elementSize(type), '\0');
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t value = (i * 37 + 11) % 251;
    out[i] = static_cast<char>(type == at::kBool ? value % 2 : value);
  }
  return out;
}

struct Named {
  const char* name;
  at::ScalarType type;
};
constexpr Named kTypes[] = {
    {"float64", at::kDouble},
    {"float32", at::kFloat},
    {"float16", at::kHalf},
    {"bfloat16", at::kBFloat16},
    {"int64", at::kLong},
    {"int32", at::kInt},
    {"int16", at::kShort},
    {"int8", at::kChar},
    {"uint64", at::ScalarType::UInt64},
    {"uint32", at::ScalarType::UInt32},
    {"uint16", at::ScalarType::UInt16},
    {"uint8", at::kByte},
    {"bool", at::kBool},
    {"complex64", at::kComplexFloat},
    {"float8_e4m3fn", at::kFloat8_e4m3fn},
    {"float8_e5m2", at::kFloat8_e5m2},
    {"float8_e4m3fnuz", at::kFloat8_e4m3fnuz},
    {"float8_e5m2fnuz", at::kFloat8_e5m2fnuz},
    {"float8_e8m0fnu", at::ScalarType::Float8_e8m0fnu},
};
const std::string kOddName = "grüße \"quoted\"\n";

TEST(Safetensors, ReadsWhatTheLibraryWrites) {
  TempDir dir;
  const auto python = run_python(test_file("peer/safetensors_peer.py"), {"write", dir.path() + "/all.safetensors"});
  ASSERT_EQ(python.exit_code, 0) << python.output;
  const std::string content = read_file(dir.path() + "/all.safetensors");
  const SafetensorsHeader header = read(content);
  EXPECT_EQ(header.tensors.size(), std::size(kTypes) + 3);
  EXPECT_EQ(header.notes, (SafetensorsNotes{{"format", "pt"}, {"note", "ä"}}));
  for (const auto& [name, type] : kTypes) {
    const SafetensorsTensor* tensor = header.find(name);
    ASSERT_NE(tensor, nullptr) << name;
    EXPECT_EQ(tensor->dtype, type) << name;
    EXPECT_EQ(tensor->sizes, (std::vector<int64_t>{2, 3})) << name;
    EXPECT_EQ(content.substr(tensor->begin, tensor->end - tensor->begin), bytes_of(type)) << name;
  }
  EXPECT_TRUE(header.find("scalar")->sizes.empty());
  EXPECT_EQ(header.find("empty")->sizes, (std::vector<int64_t>{0, 3}));
  const SafetensorsTensor* odd = header.find(kOddName);
  ASSERT_NE(odd, nullptr);
  EXPECT_EQ(content.substr(odd->begin, odd->end - odd->begin), std::string("\0\1\2\3\4", 5));
  EXPECT_EQ(header.find("none"), nullptr);
}

TEST(Safetensors, TheLibraryReadsWhatIsWritten) {
  std::vector<SafetensorsTensor> tensors;
  for (const auto& [name, type] : kTypes) tensors.push_back({name, type, {2, 3}, 0, 0});
  tensors.push_back({"scalar", at::kFloat, {}, 0, 0});
  tensors.push_back({"empty", at::kFloat, {0, 3}, 0, 0});
  tensors.push_back({kOddName, at::kByte, {5}, 0, 0});
  std::string content = make_safetensors_header(tensors, {{"format", "pt"}});
  EXPECT_EQ(content.size() % 8, 0u);
  for (const SafetensorsTensor& tensor : tensors) {
    EXPECT_EQ(tensor.begin, content.size()) << tensor.name;
    EXPECT_EQ(tensor.begin % c10::elementSize(tensor.dtype), 0u) << tensor.name;
    const float scalar = 1.5f;
    if (tensor.name == "scalar") {
      content.append(reinterpret_cast<const char*>(&scalar), sizeof(scalar));
    } else if (tensor.name == kOddName) {
      content += std::string("\0\1\2\3\4", 5);
    } else if (tensor.name != "empty") {
      content += bytes_of(tensor.dtype);
    }
    EXPECT_EQ(tensor.end, content.size()) << tensor.name;
  }
  TempDir dir;
  std::ofstream(dir.path() + "/all.safetensors", std::ios::binary) << content;
  const auto python = run_python(test_file("peer/safetensors_peer.py"), {"check", dir.path() + "/all.safetensors"});
  EXPECT_EQ(python.exit_code, 0) << python.output;
}

TEST(Safetensors, HalvesOfBytesCountInTheLastDimension) {
  // What the library writes for torch.zeros(2, 8, dtype=float4_e2m1fn_x2): shape [2, 16], 16 bytes.
  const std::string text = R"({"x":{"dtype":"F4","shape":[2,16],"data_offsets":[0,16]}})";
  const SafetensorsHeader header = read(blob(text, 16));
  EXPECT_EQ(header.tensors[0].sizes, (std::vector<int64_t>{2, 8}));
  std::vector<SafetensorsTensor> tensors = {header.tensors[0]};
  const std::string written = make_safetensors_header(tensors, {});
  EXPECT_EQ(written.substr(8, text.size()), text);
}

TEST(Safetensors, AFileWithoutTensorsIsFine) {
  EXPECT_TRUE(read(blob("{}", 0)).tensors.empty());
  EXPECT_TRUE(read(blob("{\"__metadata__\":{}}      ", 0)).tensors.empty());
  std::vector<SafetensorsTensor> none;
  EXPECT_EQ(make_safetensors_header(none, {}), blob("{}      ", 0));
}

struct Lie {
  const char* header;
  size_t data;
  const char* text;  // of the error
};

TEST(Safetensors, EveryLieOfAHeaderIsAnError) {
  const Lie lies[] = {
      {"", 0, "not JSON at offset"},
      {"[]", 0, "found a list, where one object of tensors is expected"},
      {"{\"a\":3}", 0, "found a number for 'a', where a tensor's object is expected"},
      {"{\"a\":{}}", 0, "'a' lacks one of dtype, shape and data_offsets"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})", 1, "not JSON at offset"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}} x)", 1, "not JSON at offset"},
      {R"({"a":{"dtype":"U8","shape":[1]}})", 1, "'a' lacks one of"},
      {R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, "found a number in the field 'dtype' of 'a'"},
      {R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "found a negative number in the field 'shape'"},
      {R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1, "a number that is not whole"},
      {R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", 1, "found a list in the field 'shape'"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1, "'a' has 1 data_offsets"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1, "found a number in the field 'data_offsets'"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1}})", 1, "in the field 'more' of 'a'"},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, "in the field 'dtype' of 'a'"},
      {R"({"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", 1, "in the field 'shape' of 'a'"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       1, "the name 'a' is there twice"},
      {R"({"__metadata__":{"k":"1"},"__metadata__":{}})", 0, "the name '__metadata__' is there twice"},
      {R"({"__metadata__":{"k":"1","k":"2"}})", 0, "the note 'k' is there twice"},
      {R"({"__metadata__":{"k":1}})", 0, "found a number for the note 'k'"},
      {R"({"__metadata__":{"k":{}}})", 0, "found an object for the note 'k'"},
      {R"({"__metadata__":3})", 0, "found a number for '__metadata__'"},
      {R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1, "its last dimension must be even"},
      {R"({"a":{"dtype":"F4","shape":[],"data_offsets":[0,1]}})", 1, "its last dimension must be even"},
      // Lengths and offsets.
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,3]}})", 3, "needs 4 bytes, its data_offsets are 0 to 3"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1, "its data_offsets are 1 to 0"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 1, "its tensors end at offset 63, the blob has 62"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 2, "its tensors end at offset"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2, "'a' begins at offset"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3, "'b' begins at offset"},
      {R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0, "impossible shape"},
      {R"({"a":{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}})", 0, "impossible shape"},
      {R"({"a":{"dtype":"F64","shape":[9223372036854775807],"data_offsets":[0,0]}})", 0, "impossible shape"},
      {R"({"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,0]}})", 0,
       "has the size 18446744073709551615"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}})", 1,
       "'a' ends at 18446744073709551615"},
      {"{\"\xff\":{}}", 0, "not JSON at offset"},
  };
  for (const Lie& lie : lies) {
    SCOPED_TRACE(lie.header);
    EXPECT_FSDP2_ERROR(read(blob(lie.header, lie.data)), kCorruption, lie.text);
  }
  EXPECT_FSDP2_ERROR(read(blob(R"({"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}})", 3)), kUnsupported,
                     "'a' has the dtype F6_E2M3");
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += "{\"a\":";
  EXPECT_FSDP2_ERROR(read(blob(deep, 0)), kCorruption, "found an object in the field 'a' of 'a'");
  EXPECT_FSDP2_ERROR(read("1234567"), kCorruption, "it has 7 bytes");
  std::string claims = blob("{}", 0);
  claims[0] = 3;
  EXPECT_FSDP2_ERROR(read(claims), kCorruption, "it claims a header of 3 bytes, the blob has 10");
  claims.assign(8, '\xff');
  EXPECT_FSDP2_ERROR(read(claims), kCorruption, "it claims a header of 18446744073709551615 bytes");
}

TEST(Safetensors, ABlobAtAnOffsetOfAFileIsRead) {
  TempDir dir;
  const std::string head = "something else", text = R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})";
  std::ofstream(dir.path() + "/file", std::ios::binary) << head << blob(text, 3);
  const auto file = local_storage()->open(dir.path(), "file");
  const ByteRange bytes(file, head.size(), file->size() - head.size(), "blob");
  const SafetensorsHeader header = read_safetensors_header(bytes);
  EXPECT_EQ(header.tensors[0].begin, 8 + text.size());
  EXPECT_EQ(bytes.read_text(header.tensors[0].begin, 3), "\7\7\7");
  EXPECT_FSDP2_ERROR(read_safetensors_header(ByteRange(file, 0, 10, "blob")), kCorruption, dir.path() + "/file (blob)");
}

TEST(Safetensors, WhatCannotBeWrittenIsAnError) {
  const auto write = [](std::vector<SafetensorsTensor> tensors) { return make_safetensors_header(tensors, {}); };
  EXPECT_FSDP2_ERROR(write({{"z", at::kComplexDouble, {1}, 0, 0}}), kUnsupported, "'z' has the dtype complex128");
  EXPECT_FSDP2_ERROR(write({{"z", at::kFloat, {1}, 0, 0}, {"z", at::kFloat, {1}, 0, 0}}), kInvalidArgument,
                     "two tensors are called 'z'");
  EXPECT_FSDP2_ERROR(write({{"__metadata__", at::kFloat, {1}, 0, 0}}), kInvalidArgument, "may not be called");
  EXPECT_FSDP2_ERROR(write({{"\xff", at::kFloat, {1}, 0, 0}}), kInvalidArgument, "not valid UTF-8");
}

}  // namespace
}  // namespace fsdp2::dcp::detail
