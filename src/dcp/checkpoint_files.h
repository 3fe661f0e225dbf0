#pragma once

// An opened checkpoint: its metadata, and its items by key and chunk.

#include <filesystem>
#include <memory>
#include <string>
#include <unordered_map>

#include "dcp/item.h"
#include "dcp/stored_metadata.h"

namespace fsdp2::dcp::detail {

class CheckpointFiles {
 public:
  CheckpointFiles(std::filesystem::path folder, bool verify);

  const std::filesystem::path& folder() const { return folder_; }
  const StoredMetadata& stored() const { return stored_; }
  const std::string& fqn(size_t entry) const { return stored_.metadata.entries[entry].first; }
  /// Null for a value.
  const TensorEntry* tensor(size_t entry) const {
    return std::get_if<TensorEntry>(&stored_.metadata.entries[entry].second);
  }

  /// kCorruption unless the chunks of the tensor cover it exactly and the files hold enough bytes
  /// for it.
  void check_tensor(size_t entry);
  /// Chunk `chunk` as a plain tensor of the chunk's shape.
  at::Tensor read_chunk(size_t entry, size_t chunk);
  /// The whole tensor, on CPU.
  at::Tensor read_whole(size_t entry);
  Value read_value(size_t entry);

 private:
  ByteRange range(size_t entry, size_t part);

  std::filesystem::path folder_;
  bool verify_;
  StoredMetadata stored_;
  std::unordered_map<std::string, std::shared_ptr<const FileReader>> open_;
};

}  // namespace fsdp2::dcp::detail
