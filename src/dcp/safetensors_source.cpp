#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "dcp/geometry.h"
#include "dcp/safetensors.h"
#include "dcp/safetensors_folder.h"
#include "dcp/scalar_types.h"
#include "dcp/tensor_item.h"
#include "dcp/tensor_source.h"

namespace fsdp2::dcp::detail {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr size_t kMaxIndexBytes = size_t{512} << 20;
constexpr size_t kMaxOpenFiles = 64;
constexpr const char* kShardingNote = "DCP_SHARDING_INFO";

std::shared_ptr<const InputFile> open_file(const fs::path& path) {
  // Model hubs keep folders of links to files elsewhere: follow them, these names come from the folder itself.
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  FSDP2_CHECK(!error, kNotFound, "[dcp] cannot open ", path.string(), ": ", error.message());
  return local_storage()->open(real.parent_path(), real.filename().string());
}

json parse(const std::string& text, const std::string& what) {
  try {
    return json::parse(text);
  } catch (const json::exception& error) {
    FSDP2_THROW(kCorruption, "[dcp] ", what, " is not JSON: ", error.what());
  }
}

/// Where the parts of DCP's shards lie in their tensors, by key.
std::map<std::string, std::vector<int64_t>> saved_offsets(const SafetensorsHeader& header, const std::string& what) {
  std::map<std::string, std::vector<int64_t>> result;
  const auto note = header.notes.find(kShardingNote);
  if (note == header.notes.end()) return result;
  const json info = parse(note->second, what + ": its " + kShardingNote);
  const auto fail = [&](const std::string& key) {
    FSDP2_THROW(kCorruption, "[dcp] ", what, ": ", kShardingNote, " of '", key,
                "' is not an object with a list of saved_offsets");
  };
  if (!info.is_object()) fail("");
  for (const auto& [key, value] : info.items()) {
    const auto offsets = value.is_object() ? value.find("saved_offsets") : value.end();
    if (!value.is_object() || offsets == value.end() || !offsets->is_array()) fail(key);
    for (const json& offset : *offsets) {
      if (!offset.is_number_integer() || offset.get<int64_t>() < 0) fail(key);
      result[key].push_back(offset.get<int64_t>());
    }
    result[key];  // also where the list is empty
  }
  return result;
}

class SafetensorsSource final : public TensorSource {
 public:
  explicit SafetensorsSource(const fs::path& path) : TensorSource(Format::Safetensors) {
    std::error_code error;
    if (fs::is_directory(path, error)) {
      folder_ = path;
      list_folder();
    } else {
      folder_ = path.parent_path();
      names_ = {path.filename().string()};
    }
    for (size_t i = 0; i < names_.size(); ++i) add_file(i);
    for (const auto& [key, name] : weight_map_) {
      FSDP2_CHECK(by_name_.count(key) != 0, kCorruption, "[dcp] ", (folder_ / kSafetensorsIndex).string(), ": '", key,
                  "' is said to be in ", name, ", which does not have it");
    }
    for (Item& item : items_) finish(item);
  }

  at::Tensor read(size_t index, const Chunk& box) override {
    const TensorEntry& tensor = *items_[index].tensor;
    const at::Tensor result = at::empty(box.sizes, at::TensorOptions().dtype(tensor.dtype));
    for (size_t i = 0; i < tensor.chunks.size(); ++i) {
      const auto meet = intersect(tensor.chunks[i], box);
      if (!meet || *checked_numel(meet->sizes) == 0) continue;
      const Chunk window = relative_to(*meet, tensor.chunks[i].offsets);
      const at::Tensor to = part_of(result, relative_to(*meet, box.offsets));
      const Place& place = places_[index][i];
      TensorItem(ByteRange(file(place.file), place.begin, place.length, items_[index].key), uint64_t{0}, tensor.dtype,
                 tensor.chunks[i].sizes)
          .copy_window(window, to);
    }
    return result;
  }

  Value value(size_t item) override { FSDP2_THROW(kUsage, "[dcp] '", items_[item].key, "' is a tensor, not a value"); }

  std::vector<std::string> files_of(size_t item) const override {
    std::set<std::string> names;
    for (const Place& place : places_[item]) names.insert(names_[place.file]);
    return {names.begin(), names.end()};
  }

  void describe(CheckpointContents& info) const override {
    for (size_t i = 0; i < names_.size(); ++i) info.files.push_back({names_[i], sizes_[i]});
    info.unreferenced = others_;
    info.notes = notes_;
  }

 private:
  struct Place {
    size_t file;
    uint64_t begin, length;
  };

  /// The files of the index; all safetensors files where there is none.
  void list_folder() {
    std::vector<std::string> all;
    for (const std::string& name : local_storage()->list(folder_)) {
      if (name.ends_with(".safetensors")) all.push_back(name);
    }
    names_ = all;
    std::error_code error;
    const fs::path index = folder_ / kSafetensorsIndex;
    if (fs::exists(index, error)) {
      read_index(index);
      std::set<std::string> used;
      for (const auto& [key, name] : weight_map_) used.insert(name);
      for (const std::string& name : used) {
        FSDP2_CHECK(std::find(all.begin(), all.end(), name) != all.end(), kCorruption, "[dcp] ", index.string(),
                    " names the file ", name, ", which is not there");
      }
      names_.assign(used.begin(), used.end());
      for (const std::string& name : all) {
        if (used.count(name) == 0) others_.push_back({name, fs::file_size(folder_ / name, error)});
      }
    }
    FSDP2_CHECK(!names_.empty(), kNotFound, "[dcp] there is no safetensors file in ", folder_.string());
  }

  void read_index(const fs::path& path) {
    const auto file = open_file(path);
    FSDP2_CHECK(file->size() <= kMaxIndexBytes, kCorruption, "[dcp] ", path.string(), " has ", file->size(), " bytes");
    const json index = parse(ByteRange(file, 0, file->size(), "index").read_text(0, file->size()), path.string());
    const auto map = index.is_object() ? index.find("weight_map") : index.end();
    FSDP2_CHECK(index.is_object() && map != index.end() && map->is_object(), kCorruption, "[dcp] ", path.string(),
                " has no weight_map from names of tensors to files");
    for (const auto& [key, name] : map->items()) {
      FSDP2_CHECK(name.is_string(), kCorruption, "[dcp] ", path.string(), ": the file of '", key, "' is not a text");
      weight_map_.emplace(key, name.get<std::string>());
    }
  }

  void add_file(size_t index) {
    const std::string& name = names_[index];
    const auto opened = file(index);
    sizes_.push_back(opened->size());
    const SafetensorsHeader header = read_safetensors_header(ByteRange(opened, 0, opened->size(), "safetensors"));
    for (const auto& [key, note] : header.notes) {
      if (key != kShardingNote) notes_.emplace(key, note);
    }
    const auto offsets = saved_offsets(header, opened->name());
    for (const SafetensorsTensor& tensor : header.tensors) {
      const auto [known, fresh] = by_name_.emplace(tensor.name, items_.size());
      if (fresh) {
        items_.push_back({tensor.name, Path{tensor.name}, TensorEntry{tensor.dtype, {}, {}}, 0});
        places_.emplace_back();
      }
      TensorEntry& entry = *items_[known->second].tensor;
      const auto offset = offsets.find(tensor.name);
      Chunk chunk = whole_box(tensor.sizes);
      if (offset != offsets.end()) chunk.offsets = offset->second;
      const bool same_dims = fresh || entry.chunks[0].sizes.size() == tensor.sizes.size();
      FSDP2_CHECK(chunk.offsets.size() == tensor.sizes.size() && same_dims && entry.dtype == tensor.dtype, kCorruption,
                  "[dcp] ", opened->name(), ": '", tensor.name, "' of shape ", shape_text(tensor.sizes), " and dtype ",
                  dtype_name(tensor.dtype), " at ", shape_text(chunk.offsets),
                  " does not fit the parts of it in other files");
      const auto wanted = weight_map_.find(tensor.name);
      if (wanted != weight_map_.end() && wanted->second != name) {
        FSDP2_THROW(kCorruption, "[dcp] ", (folder_ / kSafetensorsIndex).string(), ": '", tensor.name,
                    "' is said to be in ", wanted->second, ", it is in ", name);
      }
      entry.chunks.push_back(std::move(chunk));
      places_[known->second].push_back({index, tensor.begin, tensor.end - tensor.begin});
    }
  }

  /// The parts say how big the tensor is: the end of the last one.
  void finish(Item& item) {
    TensorEntry& entry = *item.tensor;
    const std::string where = c10::str("[dcp] ", folder_.string(), ": '", item.key, "'");
    entry.sizes.assign(entry.chunks[0].sizes.size(), 0);
    for (const Chunk& chunk : entry.chunks) {
      for (size_t d = 0; d < entry.sizes.size(); ++d) {
        int64_t end = 0;
        FSDP2_CHECK(!__builtin_add_overflow(chunk.offsets[d], chunk.sizes[d], &end), kCorruption, where,
                    " has a part at ", shape_text(chunk.offsets));
        entry.sizes[d] = std::max(entry.sizes[d], end);
      }
    }
    const auto numel = checked_numel(entry.sizes);
    int64_t bytes = 0;
    FSDP2_CHECK(numel && !__builtin_mul_overflow(*numel, static_cast<int64_t>(c10::elementSize(entry.dtype)), &bytes),
                kCorruption, where, " has the impossible shape ", shape_text(entry.sizes));
    item.bytes = static_cast<uint64_t>(bytes);
    const std::string fault = cover_fault(entry.sizes, entry.chunks);
    FSDP2_CHECK(fault.empty(), kCorruption, where, " of shape ", shape_text(entry.sizes), ": ", fault,
                "; is a file missing, or do two files have the same tensor?");
  }

  std::shared_ptr<const InputFile> file(size_t index) {
    auto& opened = open_[index];
    if (!opened) {
      if (open_.size() > kMaxOpenFiles) {
        open_.clear();
        return open_[index] = open_file(folder_ / names_[index]);
      }
      opened = open_file(folder_ / names_[index]);
    }
    return opened;
  }

  fs::path folder_;
  std::vector<std::string> names_;  // of the files
  std::vector<uint64_t> sizes_;     // of them
  std::vector<FileInfo> others_;
  std::map<std::string, std::string> weight_map_;
  std::map<std::string, std::string> notes_;
  std::unordered_map<std::string, size_t> by_name_;
  std::vector<std::vector<Place>> places_;  // beside items_ and their chunks
  std::unordered_map<size_t, std::shared_ptr<const InputFile>> open_;
};

}  // namespace

std::unique_ptr<TensorSource> open_safetensors(const fs::path& path) {
  return std::make_unique<SafetensorsSource>(path);
}

}  // namespace fsdp2::dcp::detail
