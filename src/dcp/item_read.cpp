#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>

#include "dcp/item.h"
#include "dcp/scalar_types.h"
#include "dcp/value_rep.h"
#include "pickle/reader.h"

namespace fsdp2::dcp::detail {
namespace {

using pickle::Graph;
using pickle::Ref;
using pickle::Type;

constexpr int kMaxDepth = 200;
constexpr size_t kMaxPickleBytes = size_t{1} << 30;
constexpr size_t kMaxBigIntBytes = 4096;
constexpr size_t kMaxDims = 64;

/// Found a class that is not plain data: the item is kept as it is.
struct NotPlainData {};

std::vector<int64_t> integers(const Graph& graph, Ref ref) {
  if (graph.type(ref) == Type::kCall && graph.callee(ref) == Graph::Name{"torch", "Size"}) {
    const Ref arguments = graph.arguments(ref);
    FSDP2_CHECK(graph.count(arguments) == 1, kCorruption, "[dcp] a torch.Size with ", graph.count(arguments),
                " arguments");
    return integers(graph, *graph.begin(arguments));
  }
  const size_t count = graph.count(ref);
  FSDP2_CHECK(count <= kMaxDims, kCorruption, "[dcp] a shape with ", count, " dimensions");
  std::vector<int64_t> result(count);
  for (size_t i = 0; i < count; ++i) result[i] = graph.integer(graph.begin(ref)[i]);
  return result;
}

void swap_bytes(at::Tensor& data, size_t element) {
  auto* bytes = static_cast<char*>(data.mutable_data_ptr());
  for (int64_t i = 0; element > 1 && i + static_cast<int64_t>(element) <= data.numel();
       i += static_cast<int64_t>(element)) {
    std::reverse(bytes + i, bytes + i + element);
  }
}

/// Reads tensors out of one archive.
class TensorReader {
 public:
  TensorReader(const ZipReader& archive, const Graph& graph) : archive_(archive), graph_(graph) {
    if (const auto* order = archive.find("byteorder")) big_endian_ = archive.read_text(*order, 16) == "big";
  }

  static bool is_tensor(const Graph& graph, Ref ref) {
    if (graph.type(ref) != Type::kCall) return false;
    const Graph::Name callee = graph.callee(ref);
    return callee.module == "torch._utils" &&
           (callee.name == "_rebuild_tensor_v2" || callee.name == "_rebuild_tensor_v3");
  }

  /// `promised`: elements that the metadata name, to refuse a wrong item before reading it.
  at::Tensor read(Ref ref, std::optional<at::ScalarType> wanted = {}, std::optional<int64_t> promised = {}) {
    const bool v3 = graph_.callee(ref).name == "_rebuild_tensor_v3";
    const Ref arguments = graph_.arguments(ref);
    const size_t count = graph_.count(arguments), least = v3 ? 7 : 6;
    if (count < least || count > least + 1) fail("a tensor is described by ", count, " arguments");
    const Ref* argument = graph_.begin(arguments);
    const int64_t offset = graph_.integer(argument[1]);
    const std::vector<int64_t> sizes = integers(graph_, argument[2]), strides = integers(graph_, argument[3]);
    std::optional<at::ScalarType> type;
    if (v3) {
      const Graph::Name name = graph_.global(argument[6]);
      if (name.module == "torch") type = dtype_from_name(name.name);
      if (!type) fail("its dtype is ", name.module, ".", name.name);
    }
    const at::Tensor storage = read_storage(graph_.persistent_id(argument[0]), type);
    const int64_t elements = storage.numel() / static_cast<int64_t>(c10::elementSize(*type));
    if (wanted && *type != *wanted)
      fail("its dtype is ", dtype_name(*type), ", the metadata say ", dtype_name(*wanted));

    if (strides.size() != sizes.size() || offset < 0) fail("its shape and strides do not fit together");
    int64_t numel = 1, last = offset;
    bool overflow = false;
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (sizes[d] < 0 || strides[d] < 0) fail("it has a negative size or stride");
      overflow |= __builtin_mul_overflow(numel, sizes[d], &numel);
      int64_t span = 0;
      overflow |= sizes[d] > 0 && __builtin_mul_overflow(sizes[d] - 1, strides[d], &span);
      overflow |= __builtin_add_overflow(last, span, &last);
    }
    const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    if (!empty && (overflow || last >= elements)) fail("its last element is ", last, " of ", elements, " stored ones");
    if (promised && (empty ? 0 : numel) != *promised) fail("it has ", numel, " elements, the metadata say ", *promised);
    at::Tensor result = at::empty({0}, at::TensorOptions().dtype(*type));
    result.set_(storage.storage(), offset, sizes, strides);
    if (count > least) apply_flags(result, argument[least]);
    return result;
  }

 private:
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    FSDP2_THROW(kCorruption, "[dcp] ", archive_.what(), ": damaged tensor: ", parts...);
  }

  /// Bytes of the storage; sets `type` from its class unless it is untyped.
  at::Tensor read_storage(Ref id, std::optional<at::ScalarType>& type) {
    if (graph_.type(id) != Type::kTuple || graph_.count(id) != 5) fail("its storage is not described by five things");
    const Ref* part = graph_.begin(id);
    const Graph::Name name = graph_.global(part[1]);
    const bool untyped = name == Graph::Name{"torch.storage", "UntypedStorage"};
    if (!untyped) {
      const auto stored = name.module == "torch" ? dtype_of_storage_class(name.name) : std::nullopt;
      if (!stored) fail("its storage is a ", name.module, ".", name.name);
      type = stored;
    }
    if (!type) fail("its storage has no dtype");
    const int64_t element = untyped ? 1 : static_cast<int64_t>(c10::elementSize(*type));
    const int64_t count = graph_.integer(part[4]);
    const std::string key(graph_.text(part[2]));
    const ZipReader::Record& record = archive_.at("data/" + key);
    int64_t bytes = 0;
    if (count < 0 || __builtin_mul_overflow(count, element, &bytes) || static_cast<uint64_t>(bytes) != record.size) {
      fail("its storage of ", count, " elements is ", record.size, " bytes long");
    }
    if (const auto known = storages_.find(key); known != storages_.end()) return known->second;
    at::Tensor data = at::empty({bytes}, at::kByte);
    archive_.read(record, bytes ? data.mutable_data_ptr() : nullptr);
    if (big_endian_) swap_bytes(data, c10::elementSize(*type) / (c10::isComplexType(*type) ? 2 : 1));
    storages_.emplace(key, data);
    return data;
  }

  void apply_flags(at::Tensor& tensor, Ref flags) {
    if (graph_.type(flags) == Type::kNone) return;
    if (graph_.type(flags) != Type::kDict && graph_.type(flags) != Type::kOrderedDict)
      fail("its flags are a ", to_string(graph_.type(flags)));
    for (size_t i = 0; i < graph_.count(flags); i += 2) {
      const std::string_view name = graph_.text(graph_.begin(flags)[i]);
      if (!graph_.boolean(graph_.begin(flags)[i + 1])) continue;
      if (name == "conj" && tensor.is_complex()) {
        tensor = tensor.conj().resolve_conj();
      } else if (name == "neg" && tensor.scalar_type() != at::kBool) {
        tensor = tensor.neg();
      } else {
        fail("it has the unknown flag ", name);
      }
    }
  }

  const ZipReader& archive_;
  const Graph& graph_;
  bool big_endian_ = false;
  std::unordered_map<std::string, at::Tensor> storages_;
};

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
    if (TensorReader::is_tensor(graph_, ref)) return tensors_.read(ref);
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

at::Tensor read_tensor_item(const ByteRange& bytes, bool verify, at::ScalarType dtype, int64_t numel) {
  const ZipReader archive(bytes, verify);
  const std::string content = archive.read_text(archive.at("data.pkl"), kMaxPickleBytes);
  const Graph graph = pickle::read(content, bytes.what(), {.allow_persistent = true});
  FSDP2_CHECK(TensorReader::is_tensor(graph, graph.root()), kCorruption, "[dcp] ", bytes.what(),
              ": the metadata say tensor, the item holds a ", to_string(graph.type(graph.root())),
              " (quantized and other special tensors are not read)");
  return TensorReader(archive, graph).read(graph.root(), dtype, numel);
}

Value read_value_item(const ByteRange& bytes, bool verify) {
  const ZipReader archive(bytes, verify);
  const std::string content = archive.read_text(archive.at("data.pkl"), kMaxPickleBytes);
  try {
    const Graph graph = pickle::read(content, bytes.what(), {.allow_persistent = true});
    TensorReader tensors(archive, graph);
    return ValueBuilder(graph, tensors).build(graph.root());
  } catch (const NotPlainData&) {
  } catch (const Error& error) {
    // A getter of Value met something else than the plain form: not plain data either.
    if (error.code() != ErrorCode::kUnsupported && error.code() != ErrorCode::kInvalidArgument) throw;
  }
  return ValueAccess::make(Kind::Opaque, bytes.read_text(0, bytes.size()));
}

}  // namespace fsdp2::dcp::detail
