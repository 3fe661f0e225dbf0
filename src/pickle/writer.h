#pragma once

// Writes pickles of protocol 2, which every Python reads.

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

namespace fsdp2::pickle {

/// Emits opcodes in the order of the calls; the caller keeps the stack right. Globals are written
/// once and then taken from the memo.
class Writer {
 public:
  Writer();

  void none() { op('N'); }
  void boolean(bool value) { op(value ? '\x88' : '\x89'); }
  void integer(int64_t value);
  /// Two's complement, least significant byte first.
  void big_integer(std::string_view bytes);
  void real(double value);
  void text(std::string_view utf8);
  /// bytes, in the way that protocol 2 has for them: an encoded text.
  void bytes(std::string_view content);
  void global(std::string_view module, std::string_view name);

  void mark() { op('('); }
  void tuple() { op('t'); }     // of what lies above the mark
  void tuple_of(size_t count);  // 0 to 3 of the top
  void empty_list() { op(']'); }
  void appends() { op('e'); }
  void empty_dict() { op('}'); }
  void set_item() { op('s'); }
  void set_items() { op('u'); }
  void reduce() { op('R'); }
  void new_object() { op('\x81'); }
  void build() { op('b'); }
  void persistent_id() { op('Q'); }
  /// torch.Size(sizes).
  template <class Sizes>
  void torch_size(const Sizes& sizes) {
    global("torch", "Size");
    integers(sizes);
    tuple_of(1);
    reduce();
  }
  /// A tuple of integers.
  template <class Sizes>
  void integers(const Sizes& values) {
    mark();
    for (int64_t value : values) integer(value);
    tuple();
  }

  /// Ends the pickle.
  std::string finish() &&;

 private:
  void op(char opcode) { out_.push_back(opcode); }
  template <class T>
  void raw(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  std::string out_;
  std::unordered_map<std::string, uint32_t> memo_;
};

/// Latin-1 text as UTF-8.
std::string utf8_of_latin1(std::string_view bytes);

}  // namespace fsdp2::pickle
