#include "checkpoint/text.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstdio>

namespace fsdp2::tool {
namespace {

using dcp::Kind;
using dcp::Value;

constexpr int kMaxDepth = 8;

/// Bytes of the UTF-8 character that begins at `at`; 0 where there is none.
size_t character(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const unsigned lead = byte(at);
  const size_t length = lead < 0x80 ? 1 : (lead >> 5) == 6 ? 2 : (lead >> 4) == 14 ? 3 : (lead >> 3) == 30 ? 4 : 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) >> 6) != 2) return 0;
  }
  return length;
}

std::string number_text(double number, int digits = 12) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.*g", digits, number);
  return text;
}

std::string tensor_text(const at::Tensor& tensor) {
  std::string out;
  const at::Tensor flat = tensor.reshape({-1});
  for (int64_t i = 0; i < flat.numel(); ++i) {
    out += out.empty() ? "" : ", ";
    const at::Tensor element = flat[i];
    if (element.is_complex()) {
      const auto value = element.to(at::kComplexDouble).item<c10::complex<double>>();
      out += number_text(value.real()) + (value.imag() < 0 ? "" : "+") + number_text(value.imag()) + "j";
    } else if (element.is_floating_point()) {
      out += number_text(element.to(at::kDouble).item<double>(), element.scalar_type() == at::kDouble ? 12 : 6);
    } else if (element.scalar_type() == at::kUInt64) {
      out += std::to_string(element.item().toUInt64());
    } else {
      out += std::to_string(element.to(at::kLong).item<int64_t>());
    }
  }
  return tensor.dim() == 0 ? out : "[" + out + "]";
}

std::string write(const Value& value, size_t limit, int depth);

std::string write_all(const std::vector<Value>& items, size_t limit, int depth) {
  std::string out;
  for (const Value& item : items) {
    if (out.size() > limit) break;
    out += (out.empty() ? "" : ", ") + write(item, limit, depth);
  }
  return out;
}

std::string write(const Value& value, size_t limit, int depth) {
  if (depth > kMaxDepth) return "...";
  const auto items = [&] { return write_all(value.list(), limit, depth + 1); };
  switch (value.kind()) {
    case Kind::None:
      return "None";
    case Kind::Bool:
      return value.boolean() ? "True" : "False";
    case Kind::Int:
      return std::to_string(value.integer());
    case Kind::BigInt:
      return value.str();
    case Kind::Double:
      return number_text(value.number());
    case Kind::Complex:
      return "complex(" + items() + ")";
    case Kind::String:
      return "'" + printable(value.str()) + "'";
    case Kind::Bytes:
    case Kind::ByteArray:
      return "<" + count_text(value.str().size(), "byte") + ">";
    case Kind::Tensor:
      return value.tensor().numel() <= 16 ? tensor_text(value.tensor())
                                          : "<tensor " + shape_text(value.tensor().sizes().vec()) + ">";
    case Kind::List:
      return "[" + items() + "]";
    case Kind::Tuple:
    case Kind::Size:
      return "(" + items() + (value.list().size() == 1 ? ",)" : ")");
    case Kind::Set:
    case Kind::FrozenSet:
      return "{" + items() + "}";
    case Kind::Dict:
    case Kind::OrderedDict: {
      std::string out;
      for (const auto& [key, item] : value.items()) {
        if (out.size() > limit) break;
        out += (out.empty() ? "" : ", ") + write(key, limit, depth + 1) + ": " + write(item, limit, depth + 1);
      }
      return "{" + out + "}";
    }
    case Kind::Dtype:
      return "torch." + value.str();
    case Kind::Device:
      return "device('" + printable(value.str()) + "')";
    case Kind::Opaque:
      break;
  }
  return "<object of a class that is not plain data>";
}

}  // namespace

std::string bytes_text(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  double number = static_cast<double>(bytes);
  while (number >= 1000 && unit + 1 < std::size(kUnits)) {
    number /= 1024;
    ++unit;
  }
  char text[40];
  std::snprintf(text, sizeof(text), unit == 0 || number >= 100 ? "%.0f %s" : "%.1f %s", number, kUnits[unit]);
  return text;
}

std::string shape_text(const std::vector<int64_t>& sizes) {
  std::string out = "[";
  for (size_t d = 0; d < sizes.size(); ++d) out += (d == 0 ? "" : ", ") + std::to_string(sizes[d]);
  return out + "]";
}

std::string count_text(size_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string list_text(const std::vector<std::string>& words, size_t most) {
  std::string out;
  for (size_t i = 0; i < std::min(most, words.size()); ++i) out += (i == 0 ? "" : ", ") + printable(words[i]);
  return words.size() <= most ? out : out + " and " + std::to_string(words.size() - most) + " more";
}

std::string value_text(const Value& value, size_t limit) {
  std::string out = write(value, limit, 0);
  if (out.size() <= limit) return out;
  size_t cut = limit;
  while (cut > 0 && (static_cast<unsigned char>(out[cut]) >> 6) == 2) --cut;
  return out.substr(0, cut) + "...";
}

std::string printable(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t length = character(text, i);
    const auto byte = static_cast<unsigned char>(text[i]);
    if (length == 0 || (length == 1 && (byte < 0x20 || byte == 0x7f))) {
      char hex[8];
      std::snprintf(hex, sizeof(hex), "\\x%02x", byte);
      out += byte == '\n' ? "\\n" : hex;
      ++i;
    } else {
      out.append(text, i, length);
      i += length;
    }
  }
  return out;
}

std::string Table::text() const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) line += row[c] + std::string(widths[c] - row[c].size() + 2, ' ');
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

}  // namespace fsdp2::tool
