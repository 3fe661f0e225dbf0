#pragma once

// What a pickle says, as a graph of nodes. Nothing is called: "make a torch.Size of (2, 3)" stays a
// node that says so.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp2::pickle {

/// A node of a graph. Nodes may be shared, and may refer to each other in circles. None, bools, small integers and the
/// empty tuple have no node: the reference itself says them.
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
  Type type(Ref ref) const {
    if ((ref & kImmediate) == 0) return nodes_[ref].type;
    if ((ref & kConstant) == 0) return Type::kInt;
    return ref == kNone ? Type::kNone : ref == kEmptyTuple ? Type::kTuple : Type::kBool;
  }
  /// Nodes; their references are the numbers below it.
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
  // Note [Compact graphs]
  // A million keys are some 20 million nodes, so a node is 12 bytes: a type, a number of 27 bits and two words. What
  // has no node: references with the top bit hold a small integer, or one of the constants. The elements of all
  // collections lie in one vector; a collection that grows after others were added moves to the end of it, with as
  // much room again, so that the whole stays proportional to the input.
  struct Node {
    Type type : 5;
    uint32_t extra : 27;     // callee of calls and records; room of a collection that moved
    uint32_t first, second;  // offset and length; module and name; arguments and state; first element and count; bits
  };
  static_assert(sizeof(Node) == 12);
  static constexpr Ref kImmediate = Ref{1} << 31, kConstant = Ref{1} << 30;
  static constexpr Ref kNone = kImmediate | kConstant, kFalse = kNone + 1, kTrue = kNone + 2, kEmptyTuple = kNone + 3;
  static constexpr size_t kMaxNodes = (size_t{1} << 27) - 1;

  Node expect(Ref ref, Type type) const;
  const Node& call_or_record(Ref ref) const;

  Ref root_ = 0;
  std::string_view input_;
  std::vector<Node> nodes_;
  std::vector<Ref> elements_;
};

}  // namespace fsdp2::pickle
