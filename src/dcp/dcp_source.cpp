#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "dcp/checkpoint_files.h"
#include "dcp/file_names.h"
#include "dcp/geometry.h"
#include "dcp/local_parts.h"
#include "dcp/tensor_source.h"

namespace fsdp2::dcp::detail {
namespace {

/// "3" of "__3_0.distcp"; -1 for other names.
int rank_of_file(const std::string& name) {
  if (!name.starts_with("__") || !name.ends_with(".distcp")) return -1;
  char* end = nullptr;
  const long rank = std::strtol(name.c_str() + 2, &end, 10);
  return end != name.c_str() + 2 && *end == '_' && rank >= 0 && rank < 1 << 24 ? static_cast<int>(rank) : -1;
}

class DcpSource final : public TensorSource {
 public:
  DcpSource(const std::filesystem::path& folder, bool verify)
      : TensorSource(Format::Dcp), files_(local_storage(), folder, verify) {
    const Metadata& metadata = files_.stored().metadata;
    for (size_t i = 0; i < metadata.entries.size(); ++i) {
      const std::string& fqn = files_.fqn(i);
      const auto path = metadata.paths.find(fqn);
      Item item{fqn, path == metadata.paths.end() ? Path{fqn} : path->second, {}, 0};
      if (const TensorEntry* tensor = files_.tensor(i)) {
        item.tensor = *tensor;
        item.bytes = static_cast<uint64_t>(*checked_numel(tensor->sizes)) * c10::elementSize(tensor->dtype);
      } else {
        item.bytes = files_.stored().locations[i][0].length;
      }
      items_.push_back(std::move(item));
    }
  }

  at::Tensor read(size_t item, const Chunk& box) override {
    const TensorEntry& tensor = *items_[item].tensor;
    if (checked_ != item) files_.check_tensor(item);
    checked_ = item;
    const at::Tensor result = at::empty(box.sizes, at::TensorOptions().dtype(tensor.dtype));
    for (size_t i = 0; i < tensor.chunks.size(); ++i) {
      const auto meet = intersect(tensor.chunks[i], box);
      if (!meet || *checked_numel(meet->sizes) == 0) continue;
      const Chunk window = relative_to(*meet, tensor.chunks[i].offsets);
      const at::Tensor to = part_of(result, relative_to(*meet, box.offsets));
      chunk(item, i).copy_window(window, to);
    }
    return result;
  }

  Value value(size_t item) override { return files_.read_value(item); }

  std::vector<std::string> files_of(size_t item) const override {
    std::set<std::string> names;
    for (const ItemLocation& place : files_.stored().locations[item]) {
      if (place.present && place.length > 0) names.insert(place.file);
    }
    return {names.begin(), names.end()};
  }

  void describe(CheckpointContents& info) const override {
    std::set<std::string> used;
    for (const auto& places : files_.stored().locations) {
      for (const ItemLocation& place : places) {
        if (place.present) used.insert(place.file);
      }
    }
    for (const std::string& name : files_.storage().list(files_.folder())) {
      if (name.ends_with("/")) {
        info.unreferenced.push_back({name, 0});
        continue;
      }
      std::error_code ignored;  // a file that cannot be looked at has no size to show
      const auto size = std::filesystem::file_size(files_.folder() / name, ignored);
      const FileInfo file{name, ignored ? 0 : static_cast<uint64_t>(size)};
      const bool of_metadata = name == kChecksumsName || (is_checkpoint_file(name) && name.ends_with(kMetadataName));
      // A rank with nothing to write leaves an empty file.
      if (used.count(name) != 0 || (file.bytes == 0 && rank_of_file(name) >= 0)) {
        info.files.push_back(file);
        info.num_ranks = std::max(info.num_ranks, rank_of_file(name) + 1);
      } else if (!of_metadata) {
        info.unreferenced.push_back(file);
      }
    }
  }

 private:
  /// The chunk that was read last stays open.
  TensorItem& chunk(size_t item, size_t index) {
    if (!open_ || open_item_ != item || open_chunk_ != index) {
      open_.reset();
      open_.emplace(files_.open_chunk(item, index));
      open_->check();  // once, not for every window
      open_item_ = item;
      open_chunk_ = index;
    }
    return *open_;
  }

  CheckpointFiles files_;
  size_t checked_ = StoredMetadata::npos;
  std::optional<TensorItem> open_;
  size_t open_item_ = 0, open_chunk_ = 0;
};

}  // namespace

std::unique_ptr<TensorSource> open_dcp(const std::filesystem::path& folder, bool verify) {
  return std::make_unique<DcpSource>(folder, verify);
}

}  // namespace fsdp2::dcp::detail
