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
  for (const Known& known : globals_) {
    if (known.name == name && known.module == module) return remember(known.memo);
  }
  op('c');
  out_.append(module).append(1, '\n').append(name).append(1, '\n');
  globals_.push_back({std::string(module), std::string(name), memoize()});
}

void Writer::name(std::string_view utf8) {
  const auto [known, fresh] = names_.try_emplace(utf8, 0);
  if (!fresh) return remember(known->second);
  text(utf8);
  known->second = memoize();
}

uint32_t Writer::memoize() {
  if (memo_size_ < 256) {
    op('q');
    raw(static_cast<uint8_t>(memo_size_));
  } else {
    op('r');
    raw(memo_size_);
  }
  return memo_size_++;
}
void Writer::remember(uint32_t memo) {
  if (memo < 256) {
    op('h');
    raw(static_cast<uint8_t>(memo));
  } else {
    op('j');
    raw(memo);
  }
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
