#include "pickle/writer.h"

#include <fsdp2/error.h>

#include <cstring>
#include <limits>

namespace fsdp2::pickle {

Writer::Writer() : out_("\x80\x02") {}

void Writer::integer(int64_t value) {
  if (value >= 0 && value < 256) {
    op('K');
    raw(static_cast<uint8_t>(value));
  } else if (value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max()) {
    op('J');
    raw(static_cast<int32_t>(value));
  } else {
    op('\x8a');
    raw(uint8_t{8});
    raw(value);
  }
}

void Writer::big_integer(std::string_view bytes) {
  if (bytes.size() < 256) {
    op('\x8a');
    raw(static_cast<uint8_t>(bytes.size()));
  } else {
    op('\x8b');
    raw(static_cast<uint32_t>(bytes.size()));
  }
  out_.append(bytes);
}

void Writer::real(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  op('G');
  raw(__builtin_bswap64(bits));
}

void Writer::text(std::string_view utf8) {
  FSDP2_CHECK(utf8.size() <= std::numeric_limits<uint32_t>::max(), kInvalidArgument, "[pickle] a text of ", utf8.size(),
              " bytes; at most 4 GiB are written");
  op('X');
  raw(static_cast<uint32_t>(utf8.size()));
  out_.append(utf8);
}

void Writer::bytes(std::string_view content) {
  if (content.empty()) {
    global("__builtin__", "bytes");
    tuple_of(0);
  } else {
    global("_codecs", "encode");
    text(utf8_of_latin1(content));
    text("latin1");
    tuple_of(2);
  }
  reduce();
}

void Writer::global(std::string_view module, std::string_view name) {
  std::string line = std::string(module) + '\n' + std::string(name) + '\n';
  const auto [entry, fresh] = memo_.try_emplace(std::move(line), static_cast<uint32_t>(memo_.size()));
  if (!fresh) {
    op('j');
    raw(entry->second);
    return;
  }
  op('c');
  out_.append(entry->first);
  op('r');
  raw(entry->second);
}

void Writer::tuple_of(size_t count) {
  static constexpr char kOpcodes[] = {')', '\x85', '\x86', '\x87'};
  op(kOpcodes[count]);
}

std::string Writer::finish() && {
  op('.');
  return std::move(out_);
}

std::string utf8_of_latin1(std::string_view bytes) {
  std::string result;
  result.reserve(bytes.size() + bytes.size() / 2);
  for (char byte : bytes) {
    const auto value = static_cast<uint8_t>(byte);
    if (value < 0x80) {
      result.push_back(byte);
    } else {
      result.push_back(static_cast<char>(0xC0 | (value >> 6)));
      result.push_back(static_cast<char>(0x80 | (value & 0x3F)));
    }
  }
  return result;
}

}  // namespace fsdp2::pickle
