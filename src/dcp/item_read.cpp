#include <fsdp2/error.h>

#include <optional>
#include <unordered_map>

#include "dcp/item.h"
#include "dcp/named_errors.h"
#include "dcp/scalar_types.h"
#include "dcp/tensor_item.h"
#include "dcp/value_rep.h"
#include "pickle/reader.h"

namespace fsdp2::dcp::detail {
namespace {

using pickle::Graph;
using pickle::Ref;
using pickle::Type;

constexpr size_t kMaxBigIntBytes = 4096;

/// Found a class that is not plain data: the item is kept as it is.
struct NotPlainData {};

/// Turns the nodes of a pickle into a Value. Shared nodes become shared values.
class ValueBuilder {
 public:
  ValueBuilder(const Graph& graph, TensorReader& tensors) : graph_(graph), tensors_(tensors) {}

  Value build(Ref ref, int depth = 0) {
    if (depth > kMaxDepth) throw NotPlainData();
    if (const auto known = done_.find(ref); known != done_.end()) {
      if (!known->second) throw NotPlainData();  // refers to itself
      return *known->second;
    }
    done_.emplace(ref, std::nullopt);
    Value result = make(ref, depth);
    done_[ref] = result;
    return result;
  }

 private:
  std::vector<Value> elements(Ref ref, int depth) {
    std::vector<Value> result;
    result.reserve(graph_.count(ref));
    for (size_t i = 0; i < graph_.count(ref); ++i) result.push_back(build(graph_.begin(ref)[i], depth + 1));
    return result;
  }

  Value make(Ref ref, int depth) {
    switch (graph_.type(ref)) {
      case Type::kNone:
        return nullptr;
      case Type::kBool:
        return graph_.boolean(ref);
      case Type::kInt:
        return graph_.integer(ref);
      case Type::kLong:
        if (graph_.text(ref).size() > kMaxBigIntBytes) throw NotPlainData();
        return ValueAccess::make(Kind::BigInt, decimal_from_bytes(graph_.text(ref)));
      case Type::kDouble:
        return graph_.real(ref);
      case Type::kString:
        return graph_.text(ref);
      case Type::kBytes:
        return Value::bytes(std::string(graph_.text(ref)));
      case Type::kByteArray:
        return Value::byte_array(std::string(graph_.text(ref)));
      case Type::kList:
        return elements(ref, depth);
      case Type::kTuple:
        return Value::tuple(elements(ref, depth));
      case Type::kSet:
        return Value::set(elements(ref, depth));
      case Type::kFrozenSet:
        return Value::frozen_set(elements(ref, depth));
      case Type::kDict:
      case Type::kOrderedDict:
        return make_dict(ref, depth);
      case Type::kGlobal:
        return make_global(ref);
      case Type::kCall:
        return make_call(ref, depth);
      case Type::kRecord:
      case Type::kPersistent:
        break;
    }
    throw NotPlainData();
  }

  Value make_dict(Ref ref, int depth) {
    const std::vector<Value> flat = elements(ref, depth);
    Items items;
    for (size_t i = 0; i < flat.size(); i += 2) items.emplace_back(flat[i], flat[i + 1]);
    return Value::from_items(std::move(items), graph_.type(ref) == Type::kOrderedDict);
  }

  Value make_global(Ref ref) {
    const Graph::Name name = graph_.global(ref);
    if (name.module == "torch") {
      if (const auto type = dtype_from_name(name.name)) return Value::dtype(*type);
    }
    throw NotPlainData();
  }

  Value make_call(Ref ref, int depth) {
    if (graph_.state(ref) != Graph::kNoState) throw NotPlainData();
    if (is_tensor(graph_, ref)) return tensors_.read(tensors_.describe(ref));
    const auto [module, name] = graph_.callee(ref);
    const std::vector<Value> arguments = elements(graph_.arguments(ref), depth);
    const bool builtin = module == "builtins" || module == "__builtin__";
    if (module == "_codecs" && name == "encode" && arguments.size() == 2)
      return Value::bytes(latin1_of_utf8(arguments[0].str()));
    if (module == "torch" && name == "Size" && arguments.size() == 1 && arguments[0].kind() == Kind::Tuple) {
      return ValueAccess::make(Kind::Size, arguments[0].list());
    }
    if (module == "torch" && name == "device") return make_device(arguments);
    if (!builtin) throw NotPlainData();
    if (name == "bytes" && arguments.empty()) return Value::bytes("");
    if (name == "bytearray") return make_byte_array(arguments);
    if (name == "complex" && arguments.size() == 2) return Value::complex(arguments[0].number(), arguments[1].number());
    if ((name == "set" || name == "frozenset") && arguments.size() <= 1) {
      std::vector<Value> content = arguments.empty() ? std::vector<Value>() : arguments[0].list();
      return name == "set" ? Value::set(std::move(content)) : Value::frozen_set(std::move(content));
    }
    throw NotPlainData();
  }

  static Value make_device(const std::vector<Value>& arguments) {
    if (arguments.empty() || arguments.size() > 2) throw NotPlainData();
    std::string text = arguments[0].str();
    if (arguments.size() == 2) text += ":" + std::to_string(arguments[1].integer());
    return ValueAccess::make(Kind::Device, std::move(text));
  }

  static Value make_byte_array(const std::vector<Value>& arguments) {
    if (arguments.empty()) return Value::byte_array("");
    if (arguments.size() == 1 && arguments[0].kind() == Kind::Bytes) return Value::byte_array(arguments[0].str());
    if (arguments.size() == 2 && arguments[0].kind() == Kind::String)
      return Value::byte_array(latin1_of_utf8(arguments[0].str()));
    throw NotPlainData();
  }

  static std::string latin1_of_utf8(const std::string& text) {
    std::string result;
    for (size_t i = 0; i < text.size(); ++i) {
      const auto lead = static_cast<uint8_t>(text[i]);
      if (lead < 0x80) {
        result.push_back(text[i]);
      } else {
        if ((lead & 0xFC) != 0xC0 || i + 1 == text.size()) throw NotPlainData();
        result.push_back(static_cast<char>((lead << 6) | (static_cast<uint8_t>(text[++i]) & 0x3F)));
      }
    }
    return result;
  }

  const Graph& graph_;
  TensorReader& tensors_;
  std::unordered_map<Ref, std::optional<Value>> done_;
};

}  // namespace

Value read_value_item(const ByteRange& bytes, bool verify) {
  const ZipReader archive(bytes, verify);
  const std::string content = archive.read_text(archive.at("data.pkl"), kMaxValueBytes);
  try {
    const Graph graph = pickle::read(content, bytes.what(), {.allow_persistent = true});
    TensorReader tensors(archive, graph);
    return naming(bytes.what(), [&] { return ValueBuilder(graph, tensors).build(graph.root()); });
  } catch (const NotPlainData&) {
  } catch (const Error& error) {
    // A getter of Value met something else than the plain form: not plain data either.
    if (error.code() != ErrorCode::kUnsupported && error.code() != ErrorCode::kInvalidArgument) throw;
  }
  return ValueAccess::make(Kind::Opaque, bytes.read_text(0, bytes.size()));
}

}  // namespace fsdp2::dcp::detail
