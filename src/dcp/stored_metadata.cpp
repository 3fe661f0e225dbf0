#include "dcp/stored_metadata.h"

#include <fsdp2/error.h>

#include <algorithm>
#include <unordered_set>

#include "dcp/geometry.h"
#include "dcp/scalar_types.h"
#include "pickle/reader.h"
#include "pickle/writer.h"

namespace fsdp2::dcp::detail {
namespace {

using pickle::Graph;
using pickle::Ref;
using pickle::Type;

constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kOldModule = "torch.distributed._shard.sharded_tensor.metadata";  // up to torch 2.2
constexpr std::string_view kFileModule = "torch.distributed.checkpoint.filesystem";
constexpr size_t kMaxDims = 64;
constexpr int64_t kMaxPathIndex = 1 << 20;

bool allow_global(std::string_view module, std::string_view name) {
  const auto any = [&](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (module == kModule) {
    return any({"Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                "_MEM_FORMAT_ENCODING", "MetadataIndex", "StorageMeta"});
  }
  if (module == kOldModule) return any({"TensorProperties", "MEM_FORMAT_ENCODING"});
  if (module == kFileModule) return any({"_StorageInfo"});
  if (module == "torch") return name == "Size" || dtype_from_name(name).has_value();
  if (module == "torch.serialization") return any({"_get_layout"});
  if (module == "collections") return any({"OrderedDict"});
  if (module == "pathlib" || module == "pathlib._local")
    return any({"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"});
  if (module == "_codecs") return any({"encode"});
  if (module == "builtins" && name == "getattr")
    return true;  // Python 3.11.0 to 3.11.3 name enum values so; never called
  return (module == "builtins" || module == "__builtin__") && any({"set", "frozenset", "bytearray", "complex"});
}

class Decoder {
 public:
  Decoder(const Graph& graph, const std::string& what, size_t pickle_bytes)
      : graph_(graph), what_(what), max_path_bytes_((size_t{1} << 20) + 64 * pickle_bytes) {}

  StoredMetadata run() {
    StoredMetadata stored;
    const Ref root = graph_.root();
    expect_record(root, kModule, "Metadata");
    decode_entries(field(root, "state_dict_metadata"), stored);
    decode_paths(field(root, "planner_data"), stored);
    decode_locations(field(root, "storage_data"), stored);
    stored.foreign = field(root, "storage_meta") != Graph::kNoState || field(root, "version") == Graph::kNoState;
    return stored;
  }

 private:
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    FSDP2_THROW(kCorruption, "[dcp] ", what_, ": ", parts...);
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
    for (size_t i = 0; i < graph_.count(state); i += 2) {
      const Ref key = graph_.begin(state)[i], value = graph_.begin(state)[i + 1];
      if (graph_.type(key) == Type::kString && graph_.text(key) == name) {
        return graph_.type(value) == Type::kNone ? Graph::kNoState : value;
      }
    }
    return Graph::kNoState;
  }
  Ref needed(Ref record, std::string_view name) const {
    const Ref value = field(record, name);
    if (value == Graph::kNoState) fail("a ", graph_.callee(record).name, " has no ", name);
    return value;
  }
  std::vector<int64_t> sizes(Ref ref) const {
    if (graph_.type(ref) == Type::kCall) {
      if (graph_.callee(ref) != Graph::Name{"torch", "Size"} || graph_.count(graph_.arguments(ref)) != 1)
        fail("found a call where a torch.Size is expected");
      ref = *graph_.begin(graph_.arguments(ref));
    }
    const size_t count = graph_.count(ref);
    if (count > kMaxDims) fail("found a shape of ", count, " dimensions; at most ", kMaxDims, " are read");
    std::vector<int64_t> result(count);
    for (size_t i = 0; i < count; ++i) result[i] = graph_.integer(graph_.begin(ref)[i]);
    return result;
  }

  void decode_entries(Ref dict, StoredMetadata& stored) {
    if (dict == Graph::kNoState || !is_dict(dict)) fail("it has no state_dict_metadata");
    auto& entries = stored.metadata.entries;
    entries.reserve(graph_.count(dict) / 2);
    for (size_t i = 0; i < graph_.count(dict); i += 2) {
      std::string fqn(graph_.text(graph_.begin(dict)[i]));
      const Ref value = graph_.begin(dict)[i + 1];
      const Graph::Name name = graph_.callee(value);
      if (name == Graph::Name{kModule, "BytesStorageMetadata"}) {
        entries.emplace_back(std::move(fqn), BytesEntry{});
        stored.locations.emplace_back(1);
        continue;
      }
      expect_record(value, kModule, "TensorStorageMetadata");
      TensorEntry entry = decode_tensor(fqn, value);
      stored.locations.emplace_back(entry.chunks.size());
      entries.emplace_back(std::move(fqn), std::move(entry));
    }
    stored.index();
    std::unordered_set<std::string_view> seen;
    for (const auto& [fqn, entry] : entries) {
      if (!seen.insert(fqn).second) fail("the key ", fqn, " is there twice");
    }
  }

  TensorEntry decode_tensor(const std::string& fqn, Ref ref) {
    TensorEntry entry;
    entry.dtype = decode_dtype(fqn, needed(ref, "properties"));
    entry.sizes = sizes(needed(ref, "size"));
    const auto numel = checked_numel(entry.sizes);
    int64_t bytes = 0;
    if (!numel || __builtin_mul_overflow(*numel, static_cast<int64_t>(c10::elementSize(entry.dtype)), &bytes)) {
      fail(fqn, " has the impossible shape ", shape_text(entry.sizes));
    }
    const Ref chunks = needed(ref, "chunks");
    // Honest chunks are objects of their own; one that is named again and again would fill the
    // memory.
    num_chunks_ += graph_.count(chunks);
    if (num_chunks_ > graph_.size()) fail("it lists more chunks than it describes");
    for (size_t i = 0; i < graph_.count(chunks); ++i) {
      const Ref part = graph_.begin(chunks)[i];
      expect_record(part, kModule, "ChunkStorageMetadata");
      Chunk chunk{sizes(needed(part, "offsets")), sizes(needed(part, "sizes"))};
      const std::string fault = chunk_fault(entry.sizes, chunk);
      if (!fault.empty()) fail(fqn, " of shape ", shape_text(entry.sizes), ": ", fault);
      entry.chunks.push_back(std::move(chunk));
    }
    return entry;
  }

  at::ScalarType decode_dtype(const std::string& fqn, Ref properties) const {
    // A tuple (dtype, layout, requires_grad, memory format, pin_memory); only the dtype matters.
    const Graph::Name name = graph_.callee(properties);
    if (name.name != "TensorProperties" || graph_.state(properties) == Graph::kNoState)
      fail(fqn, " has no tensor properties");
    const Ref state = graph_.state(properties);
    if (graph_.type(state) != Type::kTuple || graph_.count(state) < 1) fail(fqn, " has damaged tensor properties");
    const Graph::Name dtype = graph_.global(*graph_.begin(state));
    const auto type = dtype.module == "torch" ? dtype_from_name(dtype.name) : std::nullopt;
    FSDP2_CHECK(type.has_value(), kUnsupported, "[dcp] ", what_, ": ", fqn, " has the dtype ", dtype.module, ".",
                dtype.name, ", which this library does not know");
    return *type;
  }

  void decode_paths(Ref dict, StoredMetadata& stored) {
    if (dict == Graph::kNoState) return;  // saved without flattening
    if (!is_dict(dict)) fail("its planner_data are a ", to_string(graph_.type(dict)));
    for (size_t i = 0; i < graph_.count(dict); i += 2) {
      const std::string fqn(graph_.text(graph_.begin(dict)[i]));
      const Ref path = graph_.begin(dict)[i + 1];
      auto& parts = stored.metadata.paths[fqn];
      parts.clear();
      for (size_t k = 0; k < graph_.count(path); ++k) {
        const Ref part = graph_.begin(path)[k];
        if (graph_.type(part) == Type::kString) {
          parts.emplace_back(std::string(graph_.text(part)));
          path_bytes_ += sizeof(parts[0]) + graph_.text(part).size();
          if (path_bytes_ > max_path_bytes_) fail("its paths are out of all proportion");
          continue;
        }
        const int64_t index = graph_.integer(part);
        if (index < 0 || index > kMaxPathIndex)
          fail(fqn, " sits at place ", index, " of a list; at most ", kMaxPathIndex, " are read");
        parts.emplace_back(index);
      }
    }
  }

  void decode_locations(Ref dict, StoredMetadata& stored) {
    if (dict == Graph::kNoState || !is_dict(dict)) fail("it has no storage_data");
    for (size_t i = 0; i < graph_.count(dict); i += 2) {
      const Ref key = graph_.begin(dict)[i], info = graph_.begin(dict)[i + 1];
      expect_record(key, kModule, "MetadataIndex");
      expect_record(info, kFileModule, "_StorageInfo");
      const std::string fqn(graph_.text(needed(key, "fqn")));
      const size_t entry = stored.find(fqn);
      if (entry == StoredMetadata::npos) continue;  // of no use, of no harm
      ItemLocation& place = find_place(fqn, stored, entry, field(key, "offset"));
      if (place.present) continue;  // an empty chunk that several ranks wrote
      place.present = true;
      place.file = std::string(graph_.text(needed(info, "relative_path")));
      check_file_name(place.file);
      const int64_t offset = graph_.integer(needed(info, "offset")), length = graph_.integer(needed(info, "length"));
      if (offset < 0 || length < 0) fail(fqn, " lies at offset ", offset, " with length ", length);
      place.offset = static_cast<uint64_t>(offset);
      place.length = static_cast<uint64_t>(length);
      const Ref transforms = field(info, "transform_descriptors");
      FSDP2_CHECK(transforms == Graph::kNoState || graph_.count(transforms) == 0, kUnsupported, "[dcp] ", what_, ": ",
                  fqn,
                  " was saved through a stream transform (compression), which this library does "
                  "not read yet");
    }
  }

  ItemLocation& find_place(const std::string& fqn, StoredMetadata& stored, size_t entry, Ref offset_ref) {
    auto& places = stored.locations[entry];
    const auto* tensor = std::get_if<TensorEntry>(&stored.metadata.entries[entry].second);
    if (tensor == nullptr) return places[0];
    if (offset_ref == Graph::kNoState) fail(fqn, " is a tensor, one of its storage entries has no offset");
    const std::vector<int64_t> offsets = sizes(offset_ref);
    const auto& chunks = tensor->chunks;
    // An empty chunk may share its offset with nothing but other empty ones.
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (chunks[i].offsets == offsets && !places[i].present) return places[i];
    }
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (chunks[i].offsets == offsets) return places[i];
    }
    fail(fqn, " has a storage entry at ", shape_text(offsets), ", where it has no chunk");
  }

  const Graph& graph_;
  const std::string& what_;
  size_t num_chunks_ = 0;
  size_t path_bytes_ = 0, max_path_bytes_;
};

void write_record(pickle::Writer& out, std::string_view module, std::string_view name) {
  out.global(module, name);
  out.tuple_of(0);
  out.new_object();
}

void write_tensor(pickle::Writer& out, const TensorEntry& entry) {
  write_record(out, kModule, "TensorStorageMetadata");
  out.empty_dict();
  out.mark();
  out.text("properties");
  write_record(out, kModule, "TensorProperties");
  out.mark();
  out.global("torch", dtype_name(entry.dtype));
  out.global("torch.serialization", "_get_layout");
  out.text("torch.strided");
  out.tuple_of(1);
  out.reduce();
  out.boolean(false);
  out.global(kModule, "_MEM_FORMAT_ENCODING");
  out.integer(0);
  out.tuple_of(1);
  out.reduce();
  out.boolean(false);
  out.tuple();
  out.build();
  out.text("size");
  out.torch_size(entry.sizes);
  out.text("chunks");
  out.empty_list();
  out.mark();
  for (const Chunk& chunk : entry.chunks) {
    write_record(out, kModule, "ChunkStorageMetadata");
    out.empty_dict();
    out.mark();
    out.text("offsets");
    out.torch_size(chunk.offsets);
    out.text("sizes");
    out.torch_size(chunk.sizes);
    out.set_items();
    out.build();
  }
  out.appends();
  out.set_items();
  out.build();
}

void write_location(pickle::Writer& out, const std::string& fqn, const Chunk* chunk, const ItemLocation& place) {
  write_record(out, kModule, "MetadataIndex");
  out.empty_dict();
  out.mark();
  out.text("fqn");
  out.text(fqn);
  if (chunk != nullptr) {
    out.text("offset");
    out.torch_size(chunk->offsets);
  }
  out.set_items();
  out.build();
  write_record(out, kFileModule, "_StorageInfo");
  out.empty_dict();
  out.mark();
  out.text("relative_path");
  out.text(place.file);
  out.text("offset");
  out.integer(static_cast<int64_t>(place.offset));
  out.text("length");
  out.integer(static_cast<int64_t>(place.length));
  out.set_items();
  out.build();
}

}  // namespace

size_t StoredMetadata::find(const std::string& fqn) const {
  const auto found = by_name_.find(fqn);
  return found == by_name_.end() ? npos : found->second;
}
void StoredMetadata::index() {
  by_name_.clear();
  by_name_.reserve(metadata.entries.size());
  for (size_t i = 0; i < metadata.entries.size(); ++i) by_name_.emplace(metadata.entries[i].first, i);
}

std::string encode_metadata(const StoredMetadata& stored) {
  pickle::Writer out;
  write_record(out, kModule, "Metadata");
  out.empty_dict();
  out.mark();
  out.text("state_dict_metadata");
  out.empty_dict();
  out.mark();
  for (const auto& [fqn, entry] : stored.metadata.entries) {
    out.text(fqn);
    if (const auto* tensor = std::get_if<TensorEntry>(&entry)) {
      write_tensor(out, *tensor);
    } else {
      write_record(out, kModule, "BytesStorageMetadata");
    }
  }
  out.set_items();
  out.text("planner_data");
  out.empty_dict();
  out.mark();
  for (const auto& [fqn, path] : stored.metadata.paths) {
    out.text(fqn);
    out.mark();
    for (const auto& part : path) {
      if (const auto* text = std::get_if<std::string>(&part)) {
        out.text(*text);
      } else {
        out.integer(std::get<int64_t>(part));
      }
    }
    out.tuple();
  }
  out.set_items();
  out.text("storage_data");
  out.empty_dict();
  out.mark();
  for (size_t i = 0; i < stored.metadata.entries.size(); ++i) {
    const auto& [fqn, entry] = stored.metadata.entries[i];
    const auto* tensor = std::get_if<TensorEntry>(&entry);
    for (size_t k = 0; k < stored.locations[i].size(); ++k)
      write_location(out, fqn, tensor ? &tensor->chunks[k] : nullptr, stored.locations[i][k]);
  }
  out.set_items();
  // storage_meta stays None: readers of torch 2.3 and older do not know its class.
  out.text("storage_meta");
  out.none();
  out.text("version");
  out.text("1.0.0");
  out.set_items();
  out.build();
  return std::move(out).finish();
}

StoredMetadata decode_metadata(std::string_view pickle, const std::string& what) {
  const Graph graph = pickle::read(pickle, what, {.allow_global = allow_global});
  try {
    return Decoder(graph, what, pickle.size()).run();
  } catch (const Error& error) {
    const std::string text = error.what_without_backtrace();
    if (text.find(what) != std::string::npos) throw;
    FSDP2_THROW(kCorruption, "[dcp] ", what, ": ", text);
  }
}

StoredMetadata read_metadata(Storage& storage, const std::filesystem::path& folder) {
  const std::vector<std::string> names = storage.list(folder);
  const auto has = [&](const char* name) { return std::find(names.begin(), names.end(), name) != names.end(); };
  FSDP2_CHECK(!names.empty(), kNotFound, "[dcp] there is no checkpoint at ", folder.string());
  if (!has(kMetadataName)) {
    FSDP2_CHECK(!has("__0.metadata"), kUnsupported, "[dcp] ", folder.string(),
                " was saved with use_collectives=False (one metadata file per rank), which this "
                "library does not read yet");
    FSDP2_THROW(kNotFound, "[dcp] there is no checkpoint at ", folder.string(), ": it has no ", kMetadataName,
                "; the save did not finish, or this is not a checkpoint folder");
  }
  return decode_metadata(read_file(storage, folder, kMetadataName), (folder / kMetadataName).string());
}

}  // namespace fsdp2::dcp::detail
