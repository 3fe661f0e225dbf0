#include "dcp/metadata_names.h"
#include "dcp/scalar_types.h"
#include "dcp/stored_metadata.h"
#include "pickle/writer.h"

namespace fsdp2::dcp::detail {
namespace {

void write_record(pickle::Writer& out, std::string_view module, std::string_view name) {
  out.global(module, name);
  out.tuple_of(0);
  out.new_object();
}

class Encoder {
 public:
  explicit Encoder(const StoredMetadata& stored) : stored_(stored), keys_(stored.metadata.entries.size()) {
    out_.reserve(400 * stored.metadata.entries.size());
  }

  std::string run() && {
    write_record(out_, kMetadataModule, "Metadata");
    out_.empty_dict();
    out_.mark();
    out_.name("state_dict_metadata");
    write_entries();
    out_.name("planner_data");
    write_paths();
    out_.name("storage_data");
    write_locations();
    // storage_meta stays None: readers of torch 2.3 and older do not know its class.
    out_.name("storage_meta");
    out_.none();
    out_.name("version");
    out_.text("1.0.0");
    out_.set_items();
    out_.build();
    return std::move(out_).finish();
  }

 private:
  void write_entries() {
    out_.empty_dict();
    out_.mark();
    for (size_t i = 0; i < keys_.size(); ++i) {
      const auto& [fqn, entry] = stored_.metadata.entries[i];
      out_.text(fqn);
      keys_[i] = out_.memoize();  // needed again below
      if (const auto* tensor = std::get_if<TensorEntry>(&entry)) {
        write_tensor(*tensor);
      } else {
        write_record(out_, kMetadataModule, "BytesStorageMetadata");
      }
    }
    out_.set_items();
  }

  void write_tensor(const TensorEntry& entry) {
    write_record(out_, kMetadataModule, "TensorStorageMetadata");
    out_.empty_dict();
    out_.mark();
    out_.name("properties");
    write_record(out_, kMetadataModule, "TensorProperties");
    out_.mark();
    out_.global("torch", dtype_name(entry.dtype));
    out_.global("torch.serialization", "_get_layout");
    out_.name("torch.strided");
    out_.tuple_of(1);
    out_.reduce();
    out_.boolean(false);
    out_.global(kMetadataModule, "_MEM_FORMAT_ENCODING");
    out_.integer(0);
    out_.tuple_of(1);
    out_.reduce();
    out_.boolean(false);
    out_.tuple();
    out_.build();
    out_.name("size");
    out_.torch_size(entry.sizes);
    out_.name("chunks");
    out_.empty_list();
    out_.mark();
    for (const Chunk& chunk : entry.chunks) {
      write_record(out_, kMetadataModule, "ChunkStorageMetadata");
      out_.empty_dict();
      out_.mark();
      out_.name("offsets");
      out_.torch_size(chunk.offsets);
      out_.name("sizes");
      out_.torch_size(chunk.sizes);
      out_.set_items();
      out_.build();
    }
    out_.appends();
    out_.set_items();
    out_.build();
  }

  void write_paths() {
    out_.empty_dict();
    out_.mark();
    for (const auto& [fqn, path] : stored_.metadata.paths) {
      const size_t entry = stored_.find(fqn);
      if (entry == StoredMetadata::npos) {
        out_.text(fqn);
      } else {
        out_.remember(keys_[entry]);
      }
      out_.mark();
      for (const auto& part : path) {
        if (const auto* text = std::get_if<std::string>(&part)) {
          out_.text(*text);
        } else {
          out_.integer(std::get<int64_t>(part));
        }
      }
      out_.tuple();
    }
    out_.set_items();
  }

  void write_locations() {
    out_.empty_dict();
    out_.mark();
    for (size_t i = 0; i < keys_.size(); ++i) {
      const auto* tensor = std::get_if<TensorEntry>(&stored_.metadata.entries[i].second);
      for (size_t k = 0; k < stored_.locations[i].size(); ++k) {
        const ItemLocation& place = stored_.locations[i][k];
        if (place.present) write_location(keys_[i], tensor ? &tensor->chunks[k] : nullptr, place);
      }
    }
    out_.set_items();
  }

  void write_location(uint32_t key, const Chunk* chunk, const ItemLocation& place) {
    write_record(out_, kMetadataModule, "MetadataIndex");
    out_.empty_dict();
    out_.mark();
    out_.name("fqn");
    out_.remember(key);
    if (chunk != nullptr) {
      out_.name("offset");
      out_.torch_size(chunk->offsets);
    }
    out_.set_items();
    out_.build();
    write_record(out_, kFileModule, "_StorageInfo");
    out_.empty_dict();
    out_.mark();
    out_.name("relative_path");
    out_.name(place.file);
    out_.name("offset");
    out_.integer(static_cast<int64_t>(place.offset));
    out_.name("length");
    out_.integer(static_cast<int64_t>(place.length));
    if (!place.transforms.empty()) {
      out_.name("transform_descriptors");
      out_.empty_list();
      out_.mark();
      for (const std::string& transform : place.transforms) out_.name(transform);
      out_.appends();
    }
    out_.set_items();
    out_.build();
  }

  const StoredMetadata& stored_;
  pickle::Writer out_;
  std::vector<uint32_t> keys_;  // memo of each key
};

}  // namespace

std::string encode_metadata(const StoredMetadata& stored) { return Encoder(stored).run(); }

}  // namespace fsdp2::dcp::detail
