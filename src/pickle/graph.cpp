#include "pickle/graph.h"

#include <fsdp2/error.h>

namespace fsdp2::pickle {

const char* to_string(Type type) noexcept {
  static constexpr const char* kNames[] = {"None",  "bool",      "int",    "long",  "float",  "str",
                                           "bytes", "bytearray", "list",   "tuple", "dict",   "OrderedDict",
                                           "set",   "frozenset", "global", "call",  "object", "persistent id"};
  return kNames[static_cast<size_t>(type)];
}

const Graph::Node& Graph::expect(Ref ref, Type type) const {
  FSDP2_CHECK(nodes_[ref].type == type, kCorruption, "[pickle] found a ", to_string(nodes_[ref].type), " where a ",
              to_string(type), " is expected");
  return nodes_[ref];
}

bool Graph::boolean(Ref ref) const { return expect(ref, Type::kBool).integer != 0; }
int64_t Graph::integer(Ref ref) const { return expect(ref, Type::kInt).integer; }
double Graph::real(Ref ref) const { return expect(ref, Type::kDouble).real; }

std::string_view Graph::text(Ref ref) const {
  const Node& node = nodes_[ref];
  switch (node.type) {
    case Type::kString:
    case Type::kBytes:
    case Type::kByteArray:
    case Type::kLong:
      return input_.substr(node.pair.first, node.pair.second);
    default:
      expect(ref, Type::kString);
      return {};
  }
}

const Ref* Graph::begin(Ref ref) const {
  const Node& node = nodes_[ref];
  switch (node.type) {
    case Type::kTuple:
      return elements_.data() + node.pair.first;
    case Type::kList:
    case Type::kSet:
    case Type::kFrozenSet:
    case Type::kDict:
    case Type::kOrderedDict:
      return containers_[node.extra].data();
    default:
      FSDP2_THROW(kCorruption, "[pickle] found a ", to_string(node.type), " where a collection is expected");
  }
}
size_t Graph::count(Ref ref) const {
  begin(ref);  // checks
  const Node& node = nodes_[ref];
  return node.type == Type::kTuple ? node.pair.second : containers_[node.extra].size();
}

Graph::Name Graph::global(Ref ref) const {
  const Node& node = expect(ref, Type::kGlobal);
  return {text(node.pair.first), text(node.pair.second)};
}
Graph::Name Graph::callee(Ref ref) const {
  const Node& node = nodes_[ref];
  if (node.type != Type::kCall && node.type != Type::kRecord) expect(ref, Type::kRecord);
  return nodes_[node.extra].type == Type::kGlobal ? global(node.extra) : Name{};
}
Ref Graph::arguments(Ref ref) const {
  callee(ref);  // checks
  return nodes_[ref].pair.first;
}
Ref Graph::state(Ref ref) const {
  callee(ref);  // checks
  return nodes_[ref].pair.second;
}
Ref Graph::persistent_id(Ref ref) const { return expect(ref, Type::kPersistent).pair.first; }

}  // namespace fsdp2::pickle
