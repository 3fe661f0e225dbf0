#include "dcp/safetensors.h"

#include <fsdp2/error.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>

#include "dcp/geometry.h"
#include "dcp/scalar_types.h"

namespace fsdp2::dcp::detail {
namespace {

using at::ScalarType;
using nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the safetensors library
constexpr size_t kLengthBytes = 8, kMaxDims = 64;
constexpr const char* kNotes = "__metadata__";

constexpr std::pair<std::string_view, ScalarType> kDtypes[] = {
    {"F64", ScalarType::Double},
    {"F32", ScalarType::Float},
    {"F16", ScalarType::Half},
    {"BF16", ScalarType::BFloat16},
    {"I64", ScalarType::Long},
    {"I32", ScalarType::Int},
    {"I16", ScalarType::Short},
    {"I8", ScalarType::Char},
    {"U64", ScalarType::UInt64},
    {"U32", ScalarType::UInt32},
    {"U16", ScalarType::UInt16},
    {"U8", ScalarType::Byte},
    {"BOOL", ScalarType::Bool},
    {"C64", ScalarType::ComplexFloat},
    {"F8_E4M3", ScalarType::Float8_e4m3fn},
    {"F8_E4M3FNUZ", ScalarType::Float8_e4m3fnuz},
    {"F8_E5M2", ScalarType::Float8_e5m2},
    {"F8_E5M2FNUZ", ScalarType::Float8_e5m2fnuz},
    {"F8_E8M0", ScalarType::Float8_e8m0fnu},
    {"F4", ScalarType::Float4_e2m1fn_x2},  // counts halves of bytes: the last dimension is twice torch's
};

/// Takes the header apart while it is parsed: what is not where the format has it ends the parsing, so nothing is
/// kept that is not a tensor or a note.
class HeaderHandler : public nlohmann::json_sax<json> {
 public:
  HeaderHandler(const std::string& what, uint64_t data_begin, SafetensorsHeader& out)
      : what_(what), data_begin_(data_begin), out_(out) {}

  bool start_object(size_t) override {
    if (place_ == Place::kOutside) {
      place_ = Place::kTensors;
    } else if (place_ == Place::kTensors) {
      place_ = key_ == kNotes ? Place::kNotes : Place::kTensor;
      tensor_ = {key_, {}, {}, 0, 0};
      dtype_.clear();
      has_shape_ = has_offsets_ = false;
    } else {
      unexpected("an object");
    }
    return true;
  }
  bool end_object() override {
    if (place_ == Place::kTensor) finish_tensor();
    place_ = place_ == Place::kTensors ? Place::kOutside : Place::kTensors;
    return true;
  }
  bool key(std::string& name) override {
    if (place_ == Place::kTensor) {
      field_ = name;
    } else {
      key_ = name;
    }
    if (place_ != Place::kTensors) return true;
    const bool fresh = name == kNotes ? !std::exchange(has_notes_, true) : out_.by_name.emplace(name, 0).second;
    if (!fresh) fail("the name '", name, "' is there twice");
    return true;
  }
  bool string(std::string& text) override {
    if (place_ == Place::kNotes) {
      if (!out_.notes.emplace(key_, text).second) fail("the note '", key_, "' is there twice");
    } else if (place_ == Place::kTensor && field_ == "dtype" && dtype_.empty()) {
      dtype_ = text;
    } else {
      unexpected("text");
    }
    return true;
  }
  bool start_array(size_t) override {
    if (place_ == Place::kTensor && field_ == "shape" && !std::exchange(has_shape_, true)) {
      place_ = Place::kShape;
    } else if (place_ == Place::kTensor && field_ == "data_offsets" && !std::exchange(has_offsets_, true)) {
      place_ = Place::kOffsets;
      num_offsets_ = 0;
    } else {
      unexpected("a list");
    }
    return true;
  }
  bool end_array() override {
    if (place_ == Place::kOffsets && num_offsets_ != 2) {
      fail("'", tensor_.name, "' has ", num_offsets_, " data_offsets; they are two, begin and end");
    }
    place_ = Place::kTensor;
    return true;
  }
  bool number_unsigned(uint64_t number) override {
    if (place_ == Place::kShape) {
      if (number > INT64_MAX || tensor_.sizes.size() == kMaxDims) {
        fail("'", tensor_.name, "' has the size ", number, " in dimension ", tensor_.sizes.size());
      }
      tensor_.sizes.push_back(static_cast<int64_t>(number));
    } else if (place_ == Place::kOffsets && num_offsets_ < 2) {
      (num_offsets_++ == 0 ? tensor_.begin : tensor_.end) = number;
    } else {
      unexpected("a number");
    }
    return true;
  }
  bool number_integer(int64_t) override { return unexpected("a negative number"); }
  bool number_float(double, const std::string&) override { return unexpected("a number that is not whole"); }
  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("true or false"); }
  bool binary(json::binary_t&) override { return unexpected("binary data"); }
  bool parse_error(size_t position, const std::string&, const json::exception& error) override {
    const std::string text = error.what();  // "[json.exception.parse_error.101] parse error at line ...: what it is"
    fail("the header is not JSON at offset ", kLengthBytes + position,
         text.substr(std::min(text.find(": "), text.size())));
  }

 private:
  enum class Place { kOutside, kTensors, kNotes, kTensor, kShape, kOffsets };

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    FSDP2_THROW(kCorruption, "[dcp] ", what_, ": damaged safetensors header: ", parts...);
  }
  [[noreturn]] bool unexpected(const char* found) const {
    if (place_ == Place::kOutside || place_ == Place::kTensors) {
      fail("found ", found, place_ == Place::kTensors ? " for '" + key_ + "'" : std::string(), ", where ",
           place_ == Place::kTensors ? "a tensor's object" : "one object of tensors", " is expected");
    }
    if (place_ == Place::kNotes) fail("found ", found, " for the note '", key_, "'; notes are text");
    fail("found ", found, " in the field '", field_, "' of '", tensor_.name,
         "'; a tensor has dtype (text), shape and data_offsets (lists of numbers), each once");
  }

  void finish_tensor() {
    const std::string& name = tensor_.name;
    if (dtype_.empty() || !has_shape_ || !has_offsets_) {
      fail("'", name, "' lacks one of dtype, shape and data_offsets");
    }
    const auto type = dtype_from_safetensors(dtype_);
    FSDP2_CHECK(type.has_value(), kUnsupported, "[dcp] ", what_, ": '", name, "' has the dtype ", dtype_,
                ", which torch has no tensors of");
    tensor_.dtype = *type;
    if (*type == ScalarType::Float4_e2m1fn_x2) {
      if (tensor_.sizes.empty() || tensor_.sizes.back() % 2 != 0) {
        fail("'", name, "' of dtype F4 has the shape ", shape_text(tensor_.sizes), "; its last dimension must be even");
      }
      tensor_.sizes.back() /= 2;
    }
    const auto numel = checked_numel(tensor_.sizes);
    int64_t bytes = 0;
    if (!numel || __builtin_mul_overflow(*numel, static_cast<int64_t>(c10::elementSize(*type)), &bytes)) {
      fail("'", name, "' has the impossible shape ", shape_text(tensor_.sizes));
    }
    if (tensor_.begin > tensor_.end || tensor_.end - tensor_.begin != static_cast<uint64_t>(bytes)) {
      fail("'", name, "' of shape ", shape_text(tensor_.sizes), " and dtype ", dtype_, " needs ", bytes,
           " bytes, its data_offsets are ", tensor_.begin, " to ", tensor_.end);
    }
    if (tensor_.end > UINT64_MAX - data_begin_) fail("'", name, "' ends at ", tensor_.end);
    tensor_.begin += data_begin_;
    tensor_.end += data_begin_;
    out_.tensors.push_back(std::move(tensor_));
  }

  const std::string& what_;
  uint64_t data_begin_;
  SafetensorsHeader& out_;
  Place place_ = Place::kOutside;
  std::string key_, field_, dtype_;
  SafetensorsTensor tensor_;
  bool has_notes_ = false, has_shape_ = false, has_offsets_ = false;
  int num_offsets_ = 0;
};

}  // namespace

std::string_view safetensors_dtype(ScalarType type) {
  for (const auto& [name, known] : kDtypes) {
    if (known == type) return name;
  }
  return {};
}
std::optional<ScalarType> dtype_from_safetensors(std::string_view wanted) {
  for (const auto& [name, type] : kDtypes) {
    if (name == wanted) return type;
  }
  return std::nullopt;
}

const SafetensorsTensor* SafetensorsHeader::find(const std::string& name) const {
  const auto found = by_name.find(name);
  return found == by_name.end() ? nullptr : &tensors[found->second];
}

SafetensorsHeader read_safetensors_header(const ByteRange& bytes) {
  const auto fail = [&](const auto&... parts) {
    FSDP2_THROW(kCorruption, "[dcp] ", bytes.what(), ": not a whole safetensors blob: ", parts...);
  };
  if (bytes.size() < kLengthBytes) fail("it has ", bytes.size(), " bytes");
  uint64_t length = 0;
  bytes.read(0, &length, kLengthBytes);
  if (length > kMaxHeaderBytes || length > bytes.size() - kLengthBytes) {
    fail("it claims a header of ", length, " bytes, the blob has ", bytes.size(), "; at most ", kMaxHeaderBytes,
         " are read");
  }
  const std::string text = bytes.read_text(kLengthBytes, length);
  SafetensorsHeader result;
  HeaderHandler handler(bytes.what(), kLengthBytes + length, result);
  json::sax_parse(text, &handler);
  std::sort(result.tensors.begin(), result.tensors.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  uint64_t covered = kLengthBytes + length;
  for (size_t i = 0; i < result.tensors.size(); ++i) {
    const SafetensorsTensor& tensor = result.tensors[i];
    if (tensor.begin != covered) {
      fail("'", tensor.name, "' begins at offset ", tensor.begin, ", the data before it end at ", covered);
    }
    covered = tensor.end;
    result.by_name[tensor.name] = i;
  }
  if (covered != bytes.size()) fail("its tensors end at offset ", covered, ", the blob has ", bytes.size(), " bytes");
  return result;
}

std::string make_safetensors_header(std::vector<SafetensorsTensor>& tensors, const SafetensorsNotes& notes) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return c10::elementSize(a.dtype) > c10::elementSize(b.dtype); });
  const auto quoted = [](const std::string& text) {
    try {
      return json(text).dump();
    } catch (const json::exception&) {
      FSDP2_THROW(kInvalidArgument, "[dcp] the name '", text,
                  "' is not valid UTF-8, which safetensors demands; rename the tensor");
    }
  };
  std::string text = "{";
  if (!notes.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, note] : notes) {
      text += (text.back() == '{' ? "" : ",") + quoted(key) + ":" + quoted(note);
    }
    text += "}";
  }
  std::unordered_map<std::string_view, size_t> seen;
  uint64_t offset = 0;
  for (SafetensorsTensor& tensor : tensors) {
    const std::string_view dtype = safetensors_dtype(tensor.dtype);
    FSDP2_CHECK(!dtype.empty(), kUnsupported, "[dcp] '", tensor.name, "' has the dtype ", dtype_name(tensor.dtype),
                ", which safetensors does not have; cast it or leave it out");
    FSDP2_CHECK(tensor.name != kNotes, kInvalidArgument,
                "[dcp] a tensor may not be called __metadata__ in safetensors; rename it");
    FSDP2_CHECK(seen.emplace(tensor.name, 0).second, kInvalidArgument, "[dcp] two tensors are called '", tensor.name,
                "'; names in safetensors are unique");
    std::vector<int64_t> sizes = tensor.sizes;
    if (tensor.dtype == ScalarType::Float4_e2m1fn_x2) {
      FSDP2_CHECK(!sizes.empty(), kUnsupported, "[dcp] '", tensor.name,
                  "' has no dimensions; safetensors counts halves of bytes in the last one of float4 tensors");
      sizes.back() *= 2;
    }
    const auto numel = checked_numel(tensor.sizes);
    FSDP2_CHECK(numel.has_value(), kInvalidArgument, "[dcp] '", tensor.name, "' has the impossible shape ",
                shape_text(tensor.sizes));
    tensor.begin = offset;
    offset += static_cast<uint64_t>(*numel) * c10::elementSize(tensor.dtype);
    tensor.end = offset;
    text += c10::str(text.back() == '{' ? "" : ",", quoted(tensor.name), ":{\"dtype\":\"", dtype, "\",\"shape\":[",
                     c10::Join(",", sizes), "],\"data_offsets\":[", tensor.begin, ",", tensor.end, "]}");
  }
  text += "}";
  text.append((8 - text.size() % 8) % 8, ' ');
  FSDP2_CHECK(text.size() <= kMaxHeaderBytes, kInvalidArgument, "[dcp] ", tensors.size(), " tensors need a header of ",
              text.size(), " bytes; safetensors allows ", kMaxHeaderBytes, ": write more files");
  for (SafetensorsTensor& tensor : tensors) {
    tensor.begin += kLengthBytes + text.size();
    tensor.end += kLengthBytes + text.size();
  }
  const uint64_t length = text.size();
  std::string result(kLengthBytes, '\0');
  std::memcpy(result.data(), &length, kLengthBytes);
  return result + text;
}

}  // namespace fsdp2::dcp::detail
