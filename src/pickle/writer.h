#pragma once

// Writes pickles of protocol 2, which every Python reads.

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fsdp2::pickle {

/// Emits opcodes in the order of the calls; the caller keeps the stack right. Globals and names are written once and
/// then taken from the memo.
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
  /// text() for the few that come again and again: names of fields, of files. They must outlive the writer.
  void name(std::string_view utf8);
  /// Puts the top of the stack into the memo; remember() pushes it again.
  uint32_t memoize();
  void remember(uint32_t memo);

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

  /// Room for so many bytes in all.
  void reserve(size_t bytes) { out_.reserve(bytes); }
  /// Ends the pickle.
  std::string finish() &&;

 private:
  void op(char opcode) { out_.push_back(opcode); }
  template <class T>
  void raw(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  struct Known {
    std::string module, name;
    uint32_t memo;
  };

  std::string out_;
  std::vector<Known> globals_;  // some ten or twenty: a search is quicker than a hash
  std::unordered_map<std::string_view, uint32_t> names_;
  uint32_t memo_size_ = 0;
};

/// Latin-1 text as UTF-8.
std::string utf8_of_latin1(std::string_view bytes);

}  // namespace fsdp2::pickle
