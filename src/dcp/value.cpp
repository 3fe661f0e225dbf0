#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>

#include <algorithm>
#include <charconv>

#include "dcp/scalar_types.h"
#include "dcp/value_rep.h"

namespace fsdp2::dcp {

using detail::Items;
using detail::StatefulBox;
using detail::ValueRep;

const char* to_string(Kind kind) noexcept {
  static constexpr const char* kNames[] = {"None",  "Bool",        "Int",    "BigInt", "Double", "Complex", "String",
                                           "Bytes", "ByteArray",   "Tensor", "List",   "Tuple",  "Set",     "FrozenSet",
                                           "Dict",  "OrderedDict", "Dtype",  "Device", "Size",   "Opaque"};
  return kNames[static_cast<size_t>(kind)];
}

namespace {

template <class T>
std::shared_ptr<ValueRep> new_rep(Kind kind, T content) {
  return std::make_shared<ValueRep>(ValueRep{kind, std::move(content)});
}

[[noreturn]] void throw_wrong_kind(const Value& value, const char* wanted) {
  FSDP2_THROW(kInvalidArgument, "[dcp] a value of kind ", to_string(value.kind()), " was read as ", wanted,
              "; ask kind() first");
}

}  // namespace

Value::Value(const Value& other) : scalar_(other.scalar_), rep_(other.rep_), per_rank_(other.per_rank_) {
  if (rep_ && rep_->exposed) {
    rep_ = std::make_shared<ValueRep>(*rep_);
    rep_->exposed = false;
  }
}

Value::Value(at::Tensor tensor) {
  FSDP2_CHECK(tensor.defined(), kInvalidArgument,
              "[dcp] a value was made from an undefined tensor; use nullptr for None");
  rep_ = new_rep(Kind::Tensor, std::move(tensor));
}
Value::Value(std::vector<Value> list) : rep_(new_rep(Kind::List, std::move(list))) {}
Value::Value(StateDict dict) : rep_(new_rep(Kind::Dict, std::move(dict))) {}
Value::Value(std::shared_ptr<Stateful> object) {
  FSDP2_CHECK(object != nullptr, kInvalidArgument, "[dcp] a value was made from an empty pointer to a Stateful");
  rep_ = new_rep(Kind::Dict, StatefulBox{std::move(object), {}});
}

Value Value::make(Kind kind, std::string text) {
  Value result;
  result.rep_ = new_rep(kind, std::move(text));
  return result;
}
Value Value::make(Kind kind, std::vector<Value> items) {
  Value result;
  result.rep_ = new_rep(kind, std::move(items));
  return result;
}
Value Value::from_unsigned(uint64_t value) {
  if (value > static_cast<uint64_t>(INT64_MAX)) return make(Kind::BigInt, std::to_string(value));
  return from_integer(static_cast<int64_t>(value));
}

Value Value::bytes(std::string content) { return make(Kind::Bytes, std::move(content)); }
Value Value::byte_array(std::string content) { return make(Kind::ByteArray, std::move(content)); }
Value Value::tuple(std::vector<Value> items) { return make(Kind::Tuple, std::move(items)); }
Value Value::set(std::vector<Value> items) { return make(Kind::Set, std::move(items)); }
Value Value::frozen_set(std::vector<Value> items) { return make(Kind::FrozenSet, std::move(items)); }
Value Value::size(const std::vector<int64_t>& sizes) {
  return make(Kind::Size, std::vector<Value>(sizes.begin(), sizes.end()));
}
Value Value::complex(double real, double imag) { return make(Kind::Complex, std::vector<Value>{real, imag}); }
Value Value::dtype(at::ScalarType type) { return make(Kind::Dtype, std::string(detail::dtype_name(type))); }
Value Value::device(const c10::Device& device) { return make(Kind::Device, device.str()); }

Value Value::big_int(const std::string& decimal) {
  const bool negative = !decimal.empty() && decimal[0] == '-';
  const std::string digits = decimal.substr(negative ? 1 : 0);
  FSDP2_CHECK(!digits.empty() && digits.size() <= 10000 && digits.find_first_not_of("0123456789") == std::string::npos,
              kInvalidArgument, "[dcp] a big int was made from '", decimal.substr(0, 40),
              "'; allowed are an optional minus sign and at most 10000 digits");
  int64_t small = 0;
  const auto [end, error] = std::from_chars(decimal.data(), decimal.data() + decimal.size(), small);
  if (error == std::errc() && end == decimal.data() + decimal.size()) return small;
  return make(Kind::BigInt,
              (negative ? "-" : "") + digits.substr(std::min(digits.find_first_not_of('0'), digits.size() - 1)));
}

Value Value::ordered_dict(StateDict dict) {
  Value result;
  result.rep_ = new_rep(Kind::OrderedDict, std::move(dict));
  return result;
}

Value Value::from_items(std::vector<std::pair<Value, Value>> items, bool ordered) {
  Value result;
  const Kind kind = ordered ? Kind::OrderedDict : Kind::Dict;
  const bool text =
      std::all_of(items.begin(), items.end(), [](const auto& item) { return item.first.kind() == Kind::String; });
  if (text) {
    StateDict dict;
    for (auto& [key, value] : items) dict[key.str()] = std::move(value);
    result.rep_ = new_rep(kind, std::move(dict));
  } else {
    result.rep_ = new_rep(kind, std::move(items));
  }
  return result;
}

Kind Value::kind() const noexcept {
  static constexpr Kind kScalars[] = {Kind::None, Kind::Bool, Kind::Int, Kind::Double};
  return rep_ ? rep_->kind : kScalars[scalar_.index()];
}

const at::Tensor& Value::tensor() const {
  if (kind() != Kind::Tensor) throw_wrong_kind(*this, "a tensor");
  return std::get<at::Tensor>(rep_->content);
}
int64_t Value::integer() const {
  if (kind() == Kind::Bool) return std::get<bool>(scalar_);
  if (kind() != Kind::Int) throw_wrong_kind(*this, "an integer");
  return std::get<int64_t>(scalar_);
}
double Value::number() const {
  if (kind() == Kind::Double) return std::get<double>(scalar_);
  if (kind() != Kind::Int && kind() != Kind::Bool) throw_wrong_kind(*this, "a number");
  return static_cast<double>(integer());
}
bool Value::boolean() const {
  if (kind() != Kind::Bool) throw_wrong_kind(*this, "a bool");
  return std::get<bool>(scalar_);
}
const std::string& Value::str() const {
  if (!rep_ || !std::holds_alternative<std::string>(rep_->content)) throw_wrong_kind(*this, "text");
  return std::get<std::string>(rep_->content);
}
const std::vector<Value>& Value::list() const {
  if (!rep_ || !std::holds_alternative<std::vector<Value>>(rep_->content)) throw_wrong_kind(*this, "a list");
  return std::get<std::vector<Value>>(rep_->content);
}

const StateDict& Value::dict() const {
  if (kind() != Kind::Dict && kind() != Kind::OrderedDict) throw_wrong_kind(*this, "a dict");
  if (auto* box = std::get_if<StatefulBox>(&rep_->content)) {
    box->state = box->object->state_dict();
    return box->state;
  }
  const auto* dict = std::get_if<StateDict>(&rep_->content);
  FSDP2_CHECK(dict != nullptr, kInvalidArgument,
              "[dcp] a dict with keys that are not text was read by dict(); use items()");
  return *dict;
}
StateDict& Value::dict() {
  static_cast<const Value&>(*this).dict();  // checks
  ValueRep& rep = *detail::ValueAccess::mutable_rep(*this);
  rep.exposed = true;
  if (auto* box = std::get_if<StatefulBox>(&rep.content)) return box->state;
  return std::get<StateDict>(rep.content);
}

std::vector<std::pair<Value, Value>> Value::items() const {
  if (kind() != Kind::Dict && kind() != Kind::OrderedDict) throw_wrong_kind(*this, "a dict");
  if (const auto* items = std::get_if<Items>(&rep_->content)) return *items;
  Items result;
  for (const auto& [key, value] : dict()) result.emplace_back(key, value);
  return result;
}

StateDict::StateDict(std::initializer_list<Entry> entries) {
  for (const auto& [key, value] : entries) (*this)[key] = value;
}
StateDict::StateDict(const StateDict& other) : entries_(other.entries_) { reindex(); }
StateDict::StateDict(StateDict&& other) noexcept
    : entries_(std::move(other.entries_)), index_(std::move(other.index_)) {
  other.entries_.clear();
  other.index_.clear();
}
StateDict& StateDict::operator=(StateDict other) noexcept {
  entries_.swap(other.entries_);  // list nodes do not move: both indexes stay right
  index_.swap(other.index_);
  return *this;
}
void StateDict::reindex() {
  index_.reserve(entries_.size());
  for (auto it = entries_.begin(); it != entries_.end(); ++it) index_.emplace(it->first, it);
}

Value& StateDict::operator[](const std::string& key) {
  if (auto found = index_.find(key); found != index_.end()) return found->second->second;
  entries_.emplace_back(key, Value());
  const auto last = std::prev(entries_.end());
  index_.emplace(last->first, last);
  return last->second;
}
const Value& StateDict::at(const std::string& key) const {
  const auto found = index_.find(key);
  if (found == index_.end()) {
    std::string known;
    for (const auto& [name, value] : entries_) {
      if (known.size() > 200) {
        known += ", ...";
        break;
      }
      known += (known.empty() ? "" : ", ") + name;
    }
    FSDP2_THROW(kNotFound, "[dcp] a state dict has no key '", key, "'; it has ", known.empty() ? "no keys" : known);
  }
  return found->second->second;
}
Value& StateDict::at(const std::string& key) { return const_cast<Value&>(std::as_const(*this).at(key)); }
bool StateDict::contains(std::string_view key) const { return index_.count(key) != 0; }
bool StateDict::erase(const std::string& key) {
  const auto found = index_.find(key);
  if (found == index_.end()) return false;
  const iterator entry = found->second;
  index_.erase(found);
  entries_.erase(entry);
  return true;
}
std::vector<std::string> StateDict::keys() const {
  std::vector<std::string> result;
  result.reserve(entries_.size());
  for (const auto& [key, value] : entries_) result.push_back(key);
  return result;
}

Value per_rank(Value value) {
  detail::ValueAccess::set_per_rank(value, true);
  return value;
}

namespace detail {

ValueRep* ValueAccess::mutable_rep(Value& value) {
  if (value.rep_ && value.rep_.use_count() > 1) {
    value.rep_ = std::make_shared<ValueRep>(*value.rep_);
    value.rep_->exposed = false;
  }
  return value.rep_.get();
}

std::vector<Value>& ValueAccess::mutable_list(Value& value) {
  value.list();  // checks
  return std::get<std::vector<Value>>(mutable_rep(value)->content);
}

std::shared_ptr<Stateful> ValueAccess::stateful(const Value& value) {
  const auto* box = value.rep_ ? std::get_if<StatefulBox>(&value.rep_->content) : nullptr;
  return box ? box->object : nullptr;
}

std::string decimal_from_bytes(std::string_view bytes) {
  std::vector<uint8_t> magnitude(bytes.begin(), bytes.end());
  const bool negative = !magnitude.empty() && (magnitude.back() & 0x80) != 0;
  if (negative) {
    int carry = 1;
    for (uint8_t& byte : magnitude) {
      carry += static_cast<uint8_t>(~byte);
      byte = static_cast<uint8_t>(carry);
      carry >>= 8;
    }
  }
  std::string digits;
  while (!magnitude.empty() && magnitude.back() == 0) magnitude.pop_back();
  while (!magnitude.empty()) {
    uint32_t rest = 0;
    for (size_t i = magnitude.size(); i-- > 0;) {
      rest = rest * 256 + magnitude[i];
      magnitude[i] = static_cast<uint8_t>(rest / 10);
      rest %= 10;
    }
    digits.push_back(static_cast<char>('0' + rest));
    while (!magnitude.empty() && magnitude.back() == 0) magnitude.pop_back();
  }
  if (digits.empty()) return "0";
  if (negative) digits.push_back('-');
  std::reverse(digits.begin(), digits.end());
  return digits;
}

std::string bytes_from_decimal(const std::string& decimal) {
  const bool negative = decimal[0] == '-';
  std::string bytes;
  for (size_t i = negative ? 1 : 0; i < decimal.size(); ++i) {
    uint32_t carry = static_cast<uint32_t>(decimal[i] - '0');
    for (char& byte : bytes) {
      carry += static_cast<uint8_t>(byte) * 10u;
      byte = static_cast<char>(carry);
      carry >>= 8;
    }
    if (carry != 0) bytes.push_back(static_cast<char>(carry));
  }
  bytes.push_back('\0');  // room for the sign
  if (negative) {
    int carry = 1;
    for (char& byte : bytes) {
      carry += static_cast<uint8_t>(~byte);
      byte = static_cast<char>(carry);
      carry >>= 8;
    }
  }
  return bytes;
}

}  // namespace detail
}  // namespace fsdp2::dcp
