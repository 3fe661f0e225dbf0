#pragma once

// Inside of dcp::Value, for the code that walks and fills state dicts.

#include <fsdp2/dcp/value.h>

#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace fsdp2::dcp::detail {

using Items = std::vector<std::pair<Value, Value>>;

struct StatefulBox {
  std::shared_ptr<Stateful> object;
  StateDict state;  // what state_dict() gave last
};

/// What load() does about keys of a dict that the checkpoint lacks and that its options do not allow to be missing.
enum class Absent {
  kError,
  /// Each is taken out of the dict, with a note: hyper-parameters, which come and go between releases.
  kDropEach,
  /// All of them: the dict is emptied, with a note; only some: an error. The state of one parameter, which an
  /// optimizer makes lazily.
  kAllOrNone
};

struct ValueRep {
  Kind kind;
  std::variant<std::string, std::vector<Value>, at::Tensor, StateDict, Items, StatefulBox> content;
  bool exposed = false;            // a mutable reference was handed out: copies must not share this any more
  Absent absent = Absent::kError;  // of a dict
};

struct ValueAccess {
  static const ValueRep* rep(const Value& value) { return value.rep_.get(); }
  /// Unshared contents that the caller may change; null for scalars.
  static ValueRep* mutable_rep(Value& value);
  static Value make(Kind kind, std::string text) { return Value::make(kind, std::move(text)); }
  static Value make(Kind kind, std::vector<Value> items) { return Value::make(kind, std::move(items)); }
  static std::vector<Value>& mutable_list(Value& value);
  static bool is_per_rank(const Value& value) { return value.per_rank_; }
  static void set_per_rank(Value& value, bool marked) { value.per_rank_ = marked; }
  /// Marks a dict.
  static void set_absent(Value& dict, Absent absent) { mutable_rep(dict)->absent = absent; }
  /// The object if the value was made from one, else null.
  static std::shared_ptr<Stateful> stateful(const Value& value);
};

/// Two's complement, least significant byte first, as pickle's LONG1 stores it.
std::string decimal_from_bytes(std::string_view bytes);
std::string bytes_from_decimal(const std::string& decimal);

}  // namespace fsdp2::dcp::detail
