#include "dcp/scalar_types.h"

#include <fsdp2/error.h>

namespace fsdp2::dcp::detail {
namespace {

using at::ScalarType;

// `digits`: bits of the significand (hidden one included) or of the magnitude of an integer.
// `min_exponent`, `max_exponent`: of floating-point types, subnormals included.
struct TypeInfo {
  ScalarType type;
  std::string_view name, storage;
  bool is_float, is_complex, is_signed;
  int digits, min_exponent, max_exponent;
};

constexpr TypeInfo kTypes[] = {
    {ScalarType::Float, "float32", "FloatStorage", true, false, true, 24, -149, 128},
    {ScalarType::Double, "float64", "DoubleStorage", true, false, true, 53, -1074, 1024},
    {ScalarType::Half, "float16", "HalfStorage", true, false, true, 11, -24, 16},
    {ScalarType::BFloat16, "bfloat16", "BFloat16Storage", true, false, true, 8, -133, 128},
    {ScalarType::Bool, "bool", "BoolStorage", false, false, false, 1, 0, 0},
    {ScalarType::Byte, "uint8", "ByteStorage", false, false, false, 8, 0, 0},
    {ScalarType::Char, "int8", "CharStorage", false, false, true, 7, 0, 0},
    {ScalarType::Short, "int16", "ShortStorage", false, false, true, 15, 0, 0},
    {ScalarType::Int, "int32", "IntStorage", false, false, true, 31, 0, 0},
    {ScalarType::Long, "int64", "LongStorage", false, false, true, 63, 0, 0},
    {ScalarType::UInt16, "uint16", "", false, false, false, 16, 0, 0},
    {ScalarType::UInt32, "uint32", "", false, false, false, 32, 0, 0},
    {ScalarType::UInt64, "uint64", "", false, false, false, 64, 0, 0},
    {ScalarType::ComplexHalf, "complex32", "", true, true, true, 11, -24, 16},
    {ScalarType::ComplexFloat, "complex64", "ComplexFloatStorage", true, true, true, 24, -149, 128},
    {ScalarType::ComplexDouble, "complex128", "ComplexDoubleStorage", true, true, true, 53, -1074, 1024},
    {ScalarType::Float8_e5m2, "float8_e5m2", "", true, false, true, 3, -16, 16},
    {ScalarType::Float8_e4m3fn, "float8_e4m3fn", "", true, false, true, 4, -9, 9},
    {ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz", "", true, false, true, 3, -17, 16},
    {ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz", "", true, false, true, 4, -10, 8},
    {ScalarType::Float8_e8m0fnu, "float8_e8m0fnu", "", true, false, false, 1, -127, 128},
    {ScalarType::Float4_e2m1fn_x2, "float4_e2m1fn_x2", "", true, false, true, 2, -1, 3},
};

const TypeInfo* find(ScalarType type) {
  for (const TypeInfo& info : kTypes) {
    if (info.type == type) return &info;
  }
  return nullptr;
}

}  // namespace

std::string_view dtype_name(ScalarType type) {
  const TypeInfo* info = find(type);
  FSDP2_CHECK(info != nullptr, kUnsupported, "[dcp] a tensor of dtype ", c10::toString(type),
              " cannot be in a checkpoint; convert it to a plain dtype first");
  return info->name;
}

std::optional<ScalarType> dtype_from_name(std::string_view name) {
  static constexpr std::pair<std::string_view, ScalarType> kAliases[] = {{"float", ScalarType::Float},
                                                                         {"double", ScalarType::Double},
                                                                         {"half", ScalarType::Half},
                                                                         {"long", ScalarType::Long},
                                                                         {"int", ScalarType::Int},
                                                                         {"short", ScalarType::Short},
                                                                         {"chalf", ScalarType::ComplexHalf},
                                                                         {"cfloat", ScalarType::ComplexFloat},
                                                                         {"cdouble", ScalarType::ComplexDouble}};
  for (const TypeInfo& info : kTypes) {
    if (info.name == name) return info.type;
  }
  for (const auto& [alias, type] : kAliases) {
    if (alias == name) return type;
  }
  return std::nullopt;
}

std::string_view storage_class(ScalarType type) {
  const TypeInfo* info = find(type);
  return info ? info->storage : std::string_view();
}

std::optional<ScalarType> dtype_of_storage_class(std::string_view name) {
  for (const TypeInfo& info : kTypes) {
    if (!info.storage.empty() && info.storage == name) return info.type;
  }
  return std::nullopt;
}

bool is_narrowing(ScalarType from, ScalarType to) {
  if (from == to) return false;
  const TypeInfo* source = find(from);
  const TypeInfo* target = find(to);
  if (!source || !target || from == ScalarType::Float4_e2m1fn_x2 || to == ScalarType::Float4_e2m1fn_x2) return true;
  if (source->is_complex && !target->is_complex) return true;
  if (source->is_signed && !target->is_signed) return true;
  if (source->digits > target->digits) return true;
  if (source->is_float) {
    return !target->is_float || source->min_exponent < target->min_exponent ||
           source->max_exponent > target->max_exponent;
  }
  return target->is_float && source->digits > target->max_exponent;
}

}  // namespace fsdp2::dcp::detail
