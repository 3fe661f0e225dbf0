#pragma once

// What a checkpoint holds: plain values, tensors and nestings of them. Python twin: the objects of
// a state dict.

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <fsdp2/export.h>

namespace fsdp2::dcp {

enum class Kind {
  None,
  Bool,
  Int,
  BigInt,
  Double,
  Complex,
  String,
  Bytes,
  ByteArray,
  Tensor,
  List,
  Tuple,
  Set,
  FrozenSet,
  Dict,
  OrderedDict,
  Dtype,
  Device,
  Size,
  Opaque
};
/// "Int", "Tensor" and so on, for messages.
FSDP2_API const char* to_string(Kind kind) noexcept;

class StateDict;
class Value;

/// An object that turns itself into a state dict and back (a scheduler, a data cursor).
struct FSDP2_API Stateful {
  virtual ~Stateful() = default;
  virtual StateDict state_dict() = 0;
  virtual void load_state_dict(const StateDict& state) = 0;
};

namespace detail {
struct ValueRep;
struct ValueAccess;
}  // namespace detail

/// A value of one of the kinds above. Copies are cheap and independent of each other (contents are
/// shared until one is changed), except that tensors always share their storage. A getter of the
/// wrong kind is kInvalidArgument and says what the value is.
class FSDP2_API Value {
 public:
  Value() = default;  // None
  Value(const Value& other);
  Value(Value&& other) noexcept = default;
  Value& operator=(Value other) noexcept {
    scalar_ = other.scalar_;
    rep_ = std::move(other.rep_);
    per_rank_ = other.per_rank_;
    return *this;
  }
  Value(std::nullptr_t) {}
  Value(std::nullopt_t) {}
  template <std::same_as<bool> B>
  Value(B value) : scalar_(value) {}
  template <std::integral I>
  requires(!std::same_as<I, bool>) Value(I value) : Value(from_integer(value)) {}
  template <std::floating_point F>
  Value(F value) : scalar_(static_cast<double>(value)) {}
  template <class S>
  requires(std::convertible_to<const S&, std::string_view> && !std::same_as<S, std::nullptr_t>) Value(const S& text)
      : Value(make(Kind::String, std::string(std::string_view(text)))) {}
  Value(at::Tensor tensor);
  Value(std::vector<Value> list);  // List
  Value(StateDict dict);           // Dict
  /// Kind Dict: save() writes its state_dict(), load() calls its load_state_dict().
  Value(std::shared_ptr<Stateful> object);
  template <std::derived_from<Stateful> T>
  requires(!std::same_as<T, Stateful>) Value(const std::shared_ptr<T>& object)
      : Value(std::shared_ptr<Stateful>(object)) {}

  static Value bytes(std::string content);
  static Value byte_array(std::string content);
  static Value tuple(std::vector<Value> items);
  static Value set(std::vector<Value> items);
  static Value frozen_set(std::vector<Value> items);
  static Value size(const std::vector<int64_t>& sizes);
  static Value complex(double real, double imag);
  static Value dtype(at::ScalarType type);
  static Value device(const c10::Device& device);
  /// Decimal text, e.g. "-123456789012345678901234567890"; an Int where it fits 64 bits.
  static Value big_int(const std::string& decimal);
  static Value ordered_dict(StateDict dict);
  /// A dict whose keys need not be text.
  static Value from_items(std::vector<std::pair<Value, Value>> items, bool ordered = false);

  Kind kind() const noexcept;
  bool is_none() const noexcept { return kind() == Kind::None; }
  const at::Tensor& tensor() const;
  /// Int or Bool.
  int64_t integer() const;
  /// Double, Int or Bool.
  double number() const;
  bool boolean() const;
  /// String, Bytes, ByteArray; BigInt as decimal text; Dtype ("float32"); Device ("cuda:0"); Opaque
  /// (the saved item).
  const std::string& str() const;
  /// List, Tuple, Set, FrozenSet, Size; Complex as (re, im).
  const std::vector<Value>& list() const;
  /// Dict or OrderedDict with text keys; kInvalidArgument if a key is not text (then use items()).
  const StateDict& dict() const;
  StateDict& dict();
  /// Dict or OrderedDict with keys of any kind.
  std::vector<std::pair<Value, Value>> items() const;

 private:
  friend struct detail::ValueAccess;
  static Value make(Kind kind, std::string text);
  static Value make(Kind kind, std::vector<Value> items);
  static Value from_unsigned(uint64_t value);
  template <std::integral I>
  static Value from_integer(I value) {
    if constexpr (std::unsigned_integral<I>) {
      return from_unsigned(value);
    } else {
      Value result;
      result.scalar_ = static_cast<int64_t>(value);
      return result;
    }
  }

  std::variant<std::monostate, bool, int64_t, double> scalar_;
  std::shared_ptr<detail::ValueRep> rep_;  // null for None, Bool, Int, Double
  bool per_rank_ = false;                  // marked by per_rank()
};

/// Text keys to values in order of insertion. References to values stay valid until their key is
/// erased.
class FSDP2_API StateDict {
 public:
  using Entry = std::pair<const std::string, Value>;
  using iterator = std::list<Entry>::iterator;
  using const_iterator = std::list<Entry>::const_iterator;

  StateDict() = default;
  StateDict(std::initializer_list<Entry> entries);
  StateDict(const StateDict& other);
  StateDict(StateDict&& other) noexcept;
  StateDict& operator=(StateDict other) noexcept;

  /// Inserts None where the key is new.
  Value& operator[](const std::string& key);
  /// kNotFound naming the key if there is none.
  Value& at(const std::string& key);
  const Value& at(const std::string& key) const;
  bool contains(std::string_view key) const;
  /// False if there was no such key.
  bool erase(const std::string& key);
  size_t size() const noexcept { return entries_.size(); }
  bool empty() const noexcept { return entries_.empty(); }
  std::vector<std::string> keys() const;

  iterator begin() { return entries_.begin(); }
  iterator end() { return entries_.end(); }
  const_iterator begin() const { return entries_.begin(); }
  const_iterator end() const { return entries_.end(); }

 private:
  void reindex();
  std::list<Entry> entries_;
  std::unordered_map<std::string_view, iterator> index_;  // keys point into entries_
};

}  // namespace fsdp2::dcp
