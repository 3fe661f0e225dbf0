#include <fsdp2/error.h>

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "dcp/geometry.h"
#include "dcp/metadata_names.h"
#include "dcp/named_errors.h"
#include "dcp/scalar_types.h"
#include "dcp/stored_metadata.h"
#include "pickle/reader.h"

namespace fsdp2::dcp::detail {
namespace {

using pickle::Graph;
using pickle::Ref;
using pickle::Type;

constexpr size_t kMaxDims = 64;
constexpr int64_t kMaxPathIndex = 1 << 20;
constexpr size_t kMaxTransforms = 16;
constexpr size_t kFewChunks = 8;

/// dtypes that Python can save and that are no numbers here: named instead of called suspicious.
bool is_other_dtype(std::string_view name) {
  static constexpr std::string_view kNames[] = {"qint8", "quint8", "qint32",  "quint4x2", "quint2x4",
                                                "bits8", "bits16", "bits1x8", "bits2x4",  "bits4x2"};
  if (std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames)) return true;
  return name.size() == (name.substr(0, 1) == "u" ? 5 : 4) && name.find("int") <= 1 && name.back() <= '7';
}

bool allow_global(std::string_view module, std::string_view name) {
  const auto any = [&](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (module == kMetadataModule) {
    return any({"Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                "_MEM_FORMAT_ENCODING", "MetadataIndex", "StorageMeta"});
  }
  if (module == kOldMetadataModule) return any({"TensorProperties", "MEM_FORMAT_ENCODING"});
  if (module == kFileModule) return any({"_StorageInfo"});
  if (module == "torch") return name == "Size" || dtype_from_name(name).has_value() || is_other_dtype(name);
  if (module == "torch.serialization") return any({"_get_layout"});
  if (module == "collections") return any({"OrderedDict"});
  if (module == "pathlib" || module == "pathlib._local")
    return any({"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"});
  if (module == "_codecs") return any({"encode"});
  // getattr: see check_getattr.
  return (module == "builtins" || module == "__builtin__") &&
         any({"set", "frozenset", "bytearray", "complex", "getattr"});
}

/// Text of a stranger, fit for a message.
std::string shown(std::string_view text) {
  std::string result(text.substr(0, 200));
  std::replace_if(
      result.begin(), result.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return result + (text.size() > 200 ? "..." : "");
}

class Decoder {
 public:
  Decoder(const Graph& graph, const std::string& what, size_t pickle_bytes)
      : graph_(graph), what_(what), budget_((size_t{1} << 20) + 64 * pickle_bytes) {}

  StoredMetadata run() {
    check_getattr();
    StoredMetadata stored;
    const Ref root = graph_.root();
    expect_record(root, kMetadataModule, "Metadata");
    stored.foreign = field(root, "storage_meta") != Graph::kNoState || field(root, "version") == Graph::kNoState;
    if (const Ref version = field(root, "version"); version != Graph::kNoState) stored.version = graph_.text(version);
    decode_entries(field(root, "state_dict_metadata"), stored);
    decode_paths(field(root, "planner_data"), stored);
    decode_locations(field(root, "storage_data"), stored);
    return stored;
  }

 private:
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    FSDP2_THROW(kCorruption, "[dcp] ", what_, ": ", parts...);
  }

  /// Honest metadata are about as big decoded as pickled; shared objects that are named again and again would fill the
  /// memory.
  void spend(size_t bytes) {
    if (bytes > budget_) fail("what it describes is out of all proportion to its size");
    budget_ -= bytes;
  }

  /// Python 3.11.0 to 3.11.3 name the value of an enum so; the function has no other use here.
  void check_getattr() const {
    for (Ref ref = 0; ref < graph_.size(); ++ref) {
      const Type type = graph_.type(ref);
      if (type != Type::kCall && type != Type::kRecord) continue;
      if (graph_.callee(ref).name != "getattr") continue;
      const Ref arguments = graph_.arguments(ref);
      const bool fine = type == Type::kCall && graph_.count(arguments) == 2 &&
                        graph_.type(graph_.begin(arguments)[0]) == Type::kGlobal &&
                        graph_.type(graph_.begin(arguments)[1]) == Type::kString;
      const Graph::Name name = fine ? graph_.global(graph_.begin(arguments)[0]) : Graph::Name{};
      FSDP2_CHECK((name == Graph::Name{kMetadataModule, "_MEM_FORMAT_ENCODING"} ||
                   name == Graph::Name{kOldMetadataModule, "MEM_FORMAT_ENCODING"}),
                  kUnsupported, "[dcp] ", what_,
                  ": it calls builtins.getattr for something else than a memory format; ",
                  "nothing was run; do not use a file from a source you do not trust");
    }
  }

  void expect_record(Ref ref, std::string_view module, std::string_view name) const {
    if (graph_.type(ref) != Type::kRecord || graph_.callee(ref) != Graph::Name{module, name}) {
      fail("found a ", to_string(graph_.type(ref)), " where a ", name, " is expected");
    }
  }
  bool is_dict(Ref ref) const { return graph_.type(ref) == Type::kDict || graph_.type(ref) == Type::kOrderedDict; }
  /// A field of a record; kNoState where it is absent or None.
  Ref field(Ref record, std::string_view name) const {
    const Ref state = graph_.state(record);
    if (state == Graph::kNoState) return Graph::kNoState;
    if (!is_dict(state)) fail("the state of a ", graph_.callee(record).name, " is a ", to_string(graph_.type(state)));
    const Ref* pairs = graph_.begin(state);
    for (size_t i = 0, count = graph_.count(state); i < count; i += 2) {
      if (graph_.type(pairs[i]) == Type::kString && graph_.text(pairs[i]) == name)
        return graph_.type(pairs[i + 1]) == Type::kNone ? Graph::kNoState : pairs[i + 1];
    }
    return Graph::kNoState;
  }
  Ref needed(Ref record, std::string_view name, std::string_view fqn = {}) const {
    const Ref value = field(record, name);
    if (value == Graph::kNoState)
      fail(fqn.empty() ? "" : shown(fqn) + ": ", "a ", graph_.callee(record).name, " has no ", name);
    return value;
  }
  std::string_view string(Ref ref, std::string_view meaning) const {
    if (graph_.type(ref) != Type::kString) fail("found a ", to_string(graph_.type(ref)), " for ", meaning);
    return graph_.text(ref);
  }
  std::vector<int64_t> sizes(Ref ref) {
    if (graph_.type(ref) == Type::kCall) {
      if (graph_.callee(ref) != Graph::Name{"torch", "Size"} || graph_.count(graph_.arguments(ref)) != 1)
        fail("found a call where a torch.Size is expected");
      ref = *graph_.begin(graph_.arguments(ref));
    }
    const size_t count = graph_.count(ref);
    if (count > kMaxDims) fail("found a shape of ", count, " dimensions; at most ", kMaxDims, " are read");
    spend(count * sizeof(int64_t));
    std::vector<int64_t> result(count);
    for (size_t i = 0; i < count; ++i) result[i] = graph_.integer(graph_.begin(ref)[i]);
    return result;
  }

  void decode_entries(Ref dict, StoredMetadata& stored) {
    if (dict == Graph::kNoState || !is_dict(dict)) fail("it has no state_dict_metadata");
    auto& entries = stored.metadata.entries;
    const size_t count = graph_.count(dict) / 2;
    spend(count * (sizeof(entries[0]) + sizeof(ItemLocation)));
    entries.reserve(count);
    stored.locations.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      const std::string_view key = string(graph_.begin(dict)[2 * i], "a key");
      spend(key.size());
      std::string fqn(key);
      const Ref value = graph_.begin(dict)[2 * i + 1];
      const Type type = graph_.type(value);
      if (type != Type::kRecord) fail(shown(fqn), " is described by a ", to_string(type));
      if (graph_.callee(value) == Graph::Name{kMetadataModule, "BytesStorageMetadata"}) {
        entries.emplace_back(std::move(fqn), BytesEntry{});
        stored.locations.emplace_back(1);
        continue;
      }
      expect_record(value, kMetadataModule, "TensorStorageMetadata");
      TensorEntry entry = decode_tensor(fqn, value);
      stored.locations.emplace_back(entry.chunks.size());
      entries.emplace_back(std::move(fqn), std::move(entry));
    }
    const size_t twice = stored.index();
    if (twice != StoredMetadata::npos) fail("the key ", shown(entries[twice].first), " is there twice");
  }

  TensorEntry decode_tensor(const std::string& fqn, Ref ref) {
    TensorEntry entry;
    entry.dtype = decode_dtype(fqn, needed(ref, "properties", fqn));
    entry.sizes = sizes(needed(ref, "size", fqn));
    const auto numel = checked_numel(entry.sizes);
    int64_t bytes = 0;
    if (!numel || __builtin_mul_overflow(*numel, static_cast<int64_t>(c10::elementSize(entry.dtype)), &bytes)) {
      fail(shown(fqn), " has the impossible shape ", shape_text(entry.sizes));
    }
    const Ref chunks = needed(ref, "chunks", fqn);
    const size_t count = graph_.count(chunks);
    spend(count * (sizeof(Chunk) + sizeof(ItemLocation)));
    entry.chunks.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      const Ref part = graph_.begin(chunks)[i];
      expect_record(part, kMetadataModule, "ChunkStorageMetadata");
      Chunk chunk{sizes(needed(part, "offsets", fqn)), sizes(needed(part, "sizes", fqn))};
      const std::string fault = chunk_fault(entry.sizes, chunk);
      if (!fault.empty()) fail(shown(fqn), " of shape ", shape_text(entry.sizes), ": ", fault);
      entry.chunks.push_back(std::move(chunk));
    }
    return entry;
  }

  at::ScalarType decode_dtype(const std::string& fqn, Ref properties) const {
    // A tuple (dtype, layout, requires_grad, memory format, pin_memory); only the dtype matters.
    const bool known = graph_.type(properties) == Type::kRecord &&
                       (graph_.callee(properties) == Graph::Name{kMetadataModule, "TensorProperties"} ||
                        graph_.callee(properties) == Graph::Name{kOldMetadataModule, "TensorProperties"});
    if (!known || graph_.state(properties) == Graph::kNoState) fail(shown(fqn), " has no tensor properties");
    const Ref state = graph_.state(properties);
    if (graph_.type(state) != Type::kTuple || graph_.count(state) < 1)
      fail(shown(fqn), " has damaged tensor properties");
    const Ref first = *graph_.begin(state);
    if (graph_.type(first) != Type::kGlobal) fail(shown(fqn), " has a ", to_string(graph_.type(first)), " for a dtype");
    const Graph::Name dtype = graph_.global(first);
    const auto type = dtype.module == "torch" ? dtype_from_name(dtype.name) : std::nullopt;
    FSDP2_CHECK(type.has_value(), kUnsupported, "[dcp] ", what_, ": ", shown(fqn), " has the dtype ", dtype.module, ".",
                dtype.name, ", which this library does not know");
    return *type;
  }

  void decode_paths(Ref dict, StoredMetadata& stored) {
    if (dict == Graph::kNoState) return;  // saved without flattening
    if (!is_dict(dict)) fail("its planner_data are a ", to_string(graph_.type(dict)));
    auto& paths = stored.metadata.paths;
    for (size_t i = 0; i < graph_.count(dict); i += 2) {
      const std::string_view fqn = string(graph_.begin(dict)[i], "a key of planner_data");
      const Ref path = graph_.begin(dict)[i + 1];
      const size_t count = graph_.count(path);
      spend(fqn.size() + 128);
      std::vector<std::variant<std::string, int64_t>> parts;
      spend(count * sizeof(parts[0]));
      parts.reserve(count);
      for (size_t k = 0; k < count; ++k) {
        const Ref part = graph_.begin(path)[k];
        if (graph_.type(part) == Type::kString) {
          spend(graph_.text(part).size());
          parts.emplace_back(std::string(graph_.text(part)));
          continue;
        }
        if (graph_.type(part) != Type::kInt)
          fail("the path of ", shown(fqn), " has a ", to_string(graph_.type(part)), " in it");
        const int64_t index = graph_.integer(part);
        if (index < 0 || index > kMaxPathIndex)
          fail(shown(fqn), " sits at place ", index, " of a list; at most ", kMaxPathIndex, " are read");
        parts.emplace_back(index);
      }
      const size_t before = paths.size();
      paths.emplace_hint(paths.end(), std::string(fqn), std::move(parts));
      if (paths.size() == before) fail("planner_data have ", shown(fqn), " twice");
    }
  }

  void decode_locations(Ref dict, StoredMetadata& stored) {
    if (dict == Graph::kNoState || !is_dict(dict)) fail("it has no storage_data");
    for (size_t i = 0; i < graph_.count(dict); i += 2) {
      const Ref key = graph_.begin(dict)[i], info = graph_.begin(dict)[i + 1];
      expect_record(key, kMetadataModule, "MetadataIndex");
      expect_record(info, kFileModule, "_StorageInfo");
      const std::string_view fqn = string(needed(key, "fqn"), "a key of storage_data");
      const size_t entry = stored.find(fqn);
      if (entry == StoredMetadata::npos) continue;  // of no use, of no harm
      ItemLocation& place = find_place(fqn, stored, entry, field(key, "offset"));
      if (place.present) fail(shown(fqn), " has two storage entries for one part");
      place.present = true;
      place.file = file_name(fqn, info);
      const int64_t offset = graph_.integer(needed(info, "offset", fqn));
      const int64_t length = graph_.integer(needed(info, "length", fqn));
      if (offset < 0 || length < 0) fail(shown(fqn), " lies at offset ", offset, " with length ", length);
      place.offset = static_cast<uint64_t>(offset);
      place.length = static_cast<uint64_t>(length);
      const Ref transforms = field(info, "transform_descriptors");
      if (transforms == Graph::kNoState) continue;
      const size_t count = graph_.count(transforms);
      if (count > kMaxTransforms) fail(shown(fqn), " went through ", count, " transforms");
      for (size_t k = 0; k < count; ++k) {
        const std::string_view name = string(graph_.begin(transforms)[k], "a transform");
        spend(name.size() + sizeof(std::string));
        place.transforms.emplace_back(name);
      }
    }
  }

  std::string file_name(std::string_view fqn, Ref info) const {
    const std::string_view name = string(needed(info, "relative_path", fqn), "a file name");
    if (!is_plain_file_name(name)) {
      fail("the metadata point to the file '", shown(name), "' for ", shown(fqn),
           ", which is not a plain file name; files outside of the checkpoint folder are not read");
    }
    return std::string(name);
  }

  ItemLocation& find_place(std::string_view fqn, StoredMetadata& stored, size_t entry, Ref offset_ref) {
    auto& places = stored.locations[entry];
    const auto* tensor = std::get_if<TensorEntry>(&stored.metadata.entries[entry].second);
    if (tensor == nullptr) return places[0];
    if (offset_ref == Graph::kNoState) fail(shown(fqn), " is a tensor, one of its storage entries has no offset");
    const std::vector<int64_t> offsets = sizes(offset_ref);
    const auto& chunks = tensor->chunks;
    // Chunks at one offset are the empty ones, and one that is not; each has an entry of its own.
    ItemLocation* found = nullptr;
    if (chunks.size() <= kFewChunks) {
      for (size_t i = 0; i < chunks.size() && (found == nullptr || found->present); ++i) {
        if (chunks[i].offsets == offsets) found = &places[i];
      }
    } else {
      const std::vector<uint32_t>& order = order_of(entry, chunks);
      auto at = std::lower_bound(order.begin(), order.end(), offsets,
                                 [&](uint32_t i, const auto& wanted) { return chunks[i].offsets < wanted; });
      for (; at != order.end() && chunks[*at].offsets == offsets && (found == nullptr || found->present); ++at)
        found = &places[*at];
    }
    if (found == nullptr) fail(shown(fqn), " has a storage entry at ", shape_text(offsets), ", where it has no chunk");
    return *found;
  }

  /// Chunks by offset, for tensors in many parts.
  const std::vector<uint32_t>& order_of(size_t entry, const std::vector<Chunk>& chunks) {
    std::vector<uint32_t>& order = orders_[entry];
    if (order.empty()) {
      order.resize(chunks.size());
      std::iota(order.begin(), order.end(), 0u);
      std::sort(order.begin(), order.end(),
                [&](uint32_t a, uint32_t b) { return chunks[a].offsets < chunks[b].offsets; });
    }
    return order;
  }

  const Graph& graph_;
  const std::string& what_;
  size_t budget_;
  std::unordered_map<size_t, std::vector<uint32_t>> orders_;
};

}  // namespace

StoredMetadata decode_metadata(std::string_view pickle, const std::string& what) {
  const Graph graph = pickle::read(pickle, what, {.allow_global = allow_global});
  return naming(what, [&] { return Decoder(graph, what, pickle.size()).run(); });
}

}  // namespace fsdp2::dcp::detail
