#include "pickle/graph.h"

#include <fsdp2/error.h>

#include <bit>

namespace fsdp2::pickle {

const char* to_string(Type type) noexcept {
  static constexpr const char* kNames[] = {"None",  "bool",      "int",    "long",  "float",  "str",
                                           "bytes", "bytearray", "list",   "tuple", "dict",   "OrderedDict",
                                           "set",   "frozenset", "global", "call",  "object", "persistent id"};
  return kNames[static_cast<size_t>(type)];
}

Graph::Node Graph::expect(Ref ref, Type wanted) const {
  FSDP2_CHECK(type(ref) == wanted, kCorruption, "[pickle] found a ", to_string(type(ref)), " where a ",
              to_string(wanted), " is expected");
  return (ref & kImmediate) == 0 ? nodes_[ref] : Node{wanted, 0, 0, 0};
}

bool Graph::boolean(Ref ref) const {
  expect(ref, Type::kBool);
  return ref == kTrue;
}
int64_t Graph::integer(Ref ref) const {
  const Node node = expect(ref, Type::kInt);
  // The lower 30 bits, the highest of them for the sign.
  if ((ref & kImmediate) != 0) return static_cast<int32_t>(ref << 2) >> 2;
  return static_cast<int64_t>(uint64_t{node.second} << 32 | node.first);
}
double Graph::real(Ref ref) const {
  const Node node = expect(ref, Type::kDouble);
  return std::bit_cast<double>(uint64_t{node.second} << 32 | node.first);
}

std::string_view Graph::text(Ref ref) const {
  switch (type(ref)) {
    case Type::kString:
    case Type::kBytes:
    case Type::kByteArray:
    case Type::kLong:
      return input_.substr(nodes_[ref].first, nodes_[ref].second);
    default:
      expect(ref, Type::kString);
      return {};
  }
}

const Ref* Graph::begin(Ref ref) const {
  switch (type(ref)) {
    case Type::kTuple:
    case Type::kList:
    case Type::kSet:
    case Type::kFrozenSet:
    case Type::kDict:
    case Type::kOrderedDict:
      return elements_.data() + (ref == kEmptyTuple ? 0 : nodes_[ref].first);
    default:
      FSDP2_THROW(kCorruption, "[pickle] found a ", to_string(type(ref)), " where a collection is expected");
  }
}
size_t Graph::count(Ref ref) const {
  begin(ref);  // checks
  return ref == kEmptyTuple ? 0 : nodes_[ref].second;
}

Graph::Name Graph::global(Ref ref) const {
  const Node node = expect(ref, Type::kGlobal);
  return {text(node.first), text(node.second)};
}
const Graph::Node& Graph::call_or_record(Ref ref) const {
  if (type(ref) != Type::kCall && type(ref) != Type::kRecord) expect(ref, Type::kRecord);
  return nodes_[ref];
}
Graph::Name Graph::callee(Ref ref) const {
  const Ref callee = call_or_record(ref).extra;
  return type(callee) == Type::kGlobal ? global(callee) : Name{};
}
Ref Graph::arguments(Ref ref) const { return call_or_record(ref).first; }
Ref Graph::state(Ref ref) const { return call_or_record(ref).second; }
Ref Graph::persistent_id(Ref ref) const { return expect(ref, Type::kPersistent).first; }

}  // namespace fsdp2::pickle
