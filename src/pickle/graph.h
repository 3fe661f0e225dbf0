#pragma once

// What a pickle says, as a graph of nodes. Nothing is called: "make a torch.Size of (2, 3)" stays a
// node that says so.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp2::pickle {

/// Number of a node in its graph. Nodes may be shared, and may refer to each other in circles.
using Ref = uint32_t;

enum class Type : uint8_t {
  kNone,
  kBool,
  kInt,
  kLong,
  kDouble,
  kString,
  kBytes,
  kByteArray,
  kList,
  kTuple,
  kDict,
  kOrderedDict,
  kSet,
  kFrozenSet,
  kGlobal,      // module and name
  kCall,        // callable, arguments, state: REDUCE and a BUILD after it
  kRecord,      // class, arguments, state: NEWOBJ and a BUILD after it
  kPersistent,  // the id of something outside of the pickle
};
const char* to_string(Type type) noexcept;

/// Owned by the reader that made it; texts point into the pickle that was read, which must outlive
/// the graph.
class Graph {
 public:
  Ref root() const { return root_; }
  Type type(Ref ref) const { return nodes_[ref].type; }
  size_t size() const { return nodes_.size(); }

  // Each throws kCorruption where the node has another type.
  bool boolean(Ref ref) const;
  int64_t integer(Ref ref) const;
  double real(Ref ref) const;
  /// kString, kBytes, kByteArray; kLong as two's complement, least significant byte first.
  std::string_view text(Ref ref) const;
  /// Elements of a list, tuple or set; keys and values in turn of a dict.
  const Ref* begin(Ref ref) const;
  size_t count(Ref ref) const;

  struct Name {
    std::string_view module, name;
    bool operator==(const Name&) const = default;
  };
  Name global(Ref ref) const;
  /// The class or callable of a record or call, if it is a plain global; empty names otherwise.
  Name callee(Ref ref) const;
  Ref arguments(Ref ref) const;
  /// kNoState where there was no BUILD.
  Ref state(Ref ref) const;
  /// Id of a kPersistent node.
  Ref persistent_id(Ref ref) const;

  static constexpr Ref kNoState = UINT32_MAX;

 private:
  friend class Machine;
  struct Node {
    Type type;
    uint32_t extra;  // container number; callee of calls and records
    union {
      int64_t integer;
      double real;
      struct {
        uint32_t first, second;  // offset and length; module and name; arguments and state
      } pair;
    };
  };
  const Node& expect(Ref ref, Type type) const;

  Ref root_ = 0;
  std::string_view input_;
  std::vector<Node> nodes_;
  std::vector<Ref> elements_;                 // of tuples, one after the other
  std::vector<std::vector<Ref>> containers_;  // of lists, sets and dicts
};

}  // namespace fsdp2::pickle
