#include "dcp/flatten.h"

#include <fsdp2/error.h>

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "dcp/item.h"

namespace fsdp2::dcp::detail {
namespace {

bool is_dict(const Value& value) { return value.kind() == Kind::Dict || value.kind() == Kind::OrderedDict; }

bool holds_tensor(const Value& value, int depth = 0) {
  if (value.kind() == Kind::Tensor) return true;
  if (depth > kMaxDepth) return false;
  const auto holds = [&](const Value& item) { return holds_tensor(item, depth + 1); };
  if (value.kind() == Kind::List) return std::any_of(value.list().begin(), value.list().end(), holds);
  if (!is_dict(value)) return false;
  const Items items = value.items();
  return std::any_of(items.begin(), items.end(), [&](const auto& item) { return holds(item.second); });
}

/// A list is entered if an element is a tensor, a dict, or a list that is entered.
bool enters_list(const Value& list, int depth = 0) {
  return depth < kMaxDepth && std::any_of(list.list().begin(), list.list().end(), [&](const Value& item) {
           return item.kind() == Kind::Tensor || is_dict(item) ||
                  (item.kind() == Kind::List && enters_list(item, depth + 1));
         });
}

/// What Python's str() makes of a key.
std::string key_text(const Value& key, const std::string& where) {
  switch (key.kind()) {
    case Kind::String:
      return key.str();
    case Kind::Int:
      return std::to_string(key.integer());
    case Kind::Bool:
      return key.boolean() ? "True" : "False";
    case Kind::None:
      return "None";
    default:
      FSDP2_THROW(kUnsupported, "[dcp] '", where, "' has a key of kind ", to_string(key.kind()),
                  "; keys are text, int, bool or None");
  }
}

class Flattener {
 public:
  explicit Flattener(const FlattenOptions& options)
      : rank_(std::to_string(options.rank)), objects_(options.objects), style_(options.style) {}

  std::vector<Leaf> run(StateDict& state) {
    for (auto& [key, value] : state) enter({key}, key, value, 0);
    std::unordered_set<std::string_view> seen;
    for (const Leaf& leaf : leaves_) {
      FSDP2_CHECK(seen.insert(leaf.fqn).second, kInvalidArgument, "[dcp] two values have the joined key '", leaf.fqn,
                  "'; rename one of the keys between the dots");
    }
    return std::move(leaves_);
  }

 private:
  void enter(Path path, std::string fqn, Value& value, int depth) {
    if (ValueAccess::is_per_rank(value)) {
      path.emplace_back(rank_);
      fqn += "." + rank_;
    }
    visit(std::move(path), std::move(fqn), value, depth);
  }

  void visit(Path path, std::string fqn, Value& value, int depth) {
    FSDP2_CHECK(depth < kMaxDepth, kInvalidArgument, "[dcp] '", fqn.substr(0, 200), "' is nested deeper than ",
                kMaxDepth, " levels");
    const auto child = [&](auto part, const std::string& text, Value& item) {
      Path longer = path;
      longer.emplace_back(part);
      enter(std::move(longer), fqn + "." + text, item, depth + 1);
    };
    const bool enter_dict =
        is_dict(value) && (style_ == FlattenStyle::kCurrent || ValueAccess::stateful(value) || holds_tensor(value));
    if (enter_dict) {
      auto& content = ValueAccess::mutable_rep(value)->content;
      if (auto* items = std::get_if<Items>(&content)) {
        for (auto& [key, item] : *items) {
          const std::string text = key_text(key, fqn);
          child(text, text, item);
        }
        return;
      }
      if (auto* box = std::get_if<StatefulBox>(&content)) {
        box->state = box->object->state_dict();
        if (objects_) objects_->push_back({box->object, &box->state});
      }
      auto* box = std::get_if<StatefulBox>(&content);
      StateDict& dict = box ? box->state : std::get<StateDict>(content);
      const Absent absent = ValueAccess::rep(value)->absent;
      const size_t first = leaves_.size();
      for (auto& [key, item] : dict) child(key, key, item);
      if (absent == Absent::kError) return;
      for (size_t i = first; i < leaves_.size(); ++i) {
        leaves_[i].absent = absent;
        leaves_[i].dict = &dict;
      }
    } else if (value.kind() == Kind::List &&
               (style_ == FlattenStyle::kCurrent ? enters_list(value) : holds_tensor(value))) {
      std::vector<Value>& list = ValueAccess::mutable_list(value);
      for (size_t i = 0; i < list.size(); ++i) child(static_cast<int64_t>(i), std::to_string(i), list[i]);
    } else {
      leaves_.push_back({std::move(fqn), std::move(path), &value});
    }
  }

  std::string rank_;
  std::vector<LoadedObject>* objects_;
  FlattenStyle style_;
  std::vector<Leaf> leaves_;
};

/// A nested state while it grows.
struct Node {
  enum class Kind { kEmpty, kLeaf, kDict, kList } kind = Kind::kEmpty;
  Value leaf;
  std::vector<std::pair<std::string, std::unique_ptr<Node>>> dict;
  std::unordered_map<std::string, Node*> by_key;
  std::vector<std::unique_ptr<Node>> list;

  Value take() {
    switch (kind) {
      case Kind::kEmpty:
        return nullptr;
      case Kind::kLeaf:
        return std::move(leaf);
      case Kind::kDict:
        return take_dict();
      case Kind::kList:
        break;
    }
    std::vector<Value> items;
    for (auto& node : list) items.push_back(node ? node->take() : Value());
    return items;
  }
  StateDict take_dict() {
    StateDict result;
    for (auto& [key, node] : dict) result[key] = node->take();
    return result;
  }
};

std::string path_text(const Path& path) {
  std::string text;
  for (const auto& part : path) {
    if (!text.empty()) text += ".";
    text += std::holds_alternative<std::string>(part) ? std::get<std::string>(part)
                                                      : std::to_string(std::get<int64_t>(part));
  }
  return text.substr(0, 200);
}

}  // namespace

std::vector<Leaf> flatten(StateDict& state, const FlattenOptions& options) { return Flattener(options).run(state); }

StateDict unflatten(std::vector<std::pair<Path, Value>> leaves) {
  // Lists may have gaps where empty dicts were, but no more than a state of this size can explain.
  size_t padding_left = (size_t{1} << 16) + 16 * leaves.size();
  Node root;
  root.kind = Node::Kind::kDict;
  for (auto& [path, value] : leaves) {
    const bool fine = !path.empty() && path.size() < kMaxDepth && std::holds_alternative<std::string>(path[0]);
    FSDP2_CHECK(fine, kCorruption, "[dcp] the saved path '", path_text(path),
                "' does not start with a key of the state, or is too long");
    Node* node = &root;
    for (const auto& part : path) {
      const Node::Kind wanted = std::holds_alternative<std::string>(part) ? Node::Kind::kDict : Node::Kind::kList;
      if (node->kind == Node::Kind::kEmpty) node->kind = wanted;
      FSDP2_CHECK(node->kind == wanted, kCorruption, "[dcp] the saved path '", path_text(path),
                  "' contradicts the path of another key");
      if (wanted == Node::Kind::kDict) {
        const std::string& key = std::get<std::string>(part);
        Node*& child = node->by_key[key];
        if (child == nullptr) {
          node->dict.emplace_back(key, std::make_unique<Node>());
          child = node->dict.back().second.get();
        }
        node = child;
        continue;
      }
      const auto index = static_cast<size_t>(std::get<int64_t>(part));
      if (index >= node->list.size()) {
        const size_t padding = index + 1 - node->list.size();
        FSDP2_CHECK(padding <= padding_left, kCorruption, "[dcp] the saved path '", path_text(path),
                    "' has an index out of all proportion");
        padding_left -= padding;
        node->list.resize(index + 1);
      }
      if (!node->list[index]) node->list[index] = std::make_unique<Node>();
      node = node->list[index].get();
    }
    FSDP2_CHECK(node->kind == Node::Kind::kEmpty, kCorruption, "[dcp] the saved path '", path_text(path),
                "' is also the path of another key");
    node->kind = Node::Kind::kLeaf;
    node->leaf = std::move(value);
  }
  return root.take_dict();
}

}  // namespace fsdp2::dcp::detail
