#pragma once

// An opened checkpoint: its metadata, and its items by key and chunk.

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "dcp/checksums.h"
#include "dcp/item.h"
#include "dcp/metadata_files.h"
#include "dcp/safetensors.h"
#include "dcp/stored_metadata.h"
#include "dcp/tensor_item.h"

namespace fsdp2::dcp::detail {

class CheckpointFiles {
 public:
  /// `metadata` are those of the folder.
  CheckpointFiles(std::shared_ptr<Storage> storage, std::filesystem::path folder, bool verify,
                  const MetadataFiles& metadata);
  /// Reads them. `storage` may be null: local_storage().
  CheckpointFiles(std::shared_ptr<Storage> storage, std::filesystem::path folder, bool verify);

  const std::filesystem::path& folder() const { return folder_; }
  Storage& storage() const { return *storage_; }
  const StoredMetadata& stored() const { return stored_; }
  /// Null where there are none, or they are not to be compared.
  const Checksums* checksums() const { return checksums_ ? &*checksums_ : nullptr; }
  const std::string& fqn(size_t entry) const { return stored_.metadata.entries[entry].first; }
  /// Null for a value.
  const TensorEntry* tensor(size_t entry) const {
    return std::get_if<TensorEntry>(&stored_.metadata.entries[entry].second);
  }

  /// kCorruption unless the chunks of the tensor cover it exactly.
  void check_tensor(size_t entry) const;
  /// kCorruption unless the file of the chunk holds enough bytes for it.
  void check_chunk(size_t entry, size_t chunk);
  TensorItem open_chunk(size_t entry, size_t chunk);
  /// The whole tensor, on CPU.
  at::Tensor read_whole(size_t entry);
  Value read_value(size_t entry);
  /// Reads every byte of one item, compares it with its checksums, and what it says of itself with the metadata.
  void check_item(size_t entry, size_t part);

 private:
  struct OpenFile {
    std::shared_ptr<const InputFile> file;
    /// Its tensors are one safetensors blob; unknown until a tensor is asked for.
    std::optional<bool> has_blob;
    std::shared_ptr<const SafetensorsHeader> blob;
    uint64_t blob_offset = 0;
  };

  const ItemLocation& location(size_t entry, size_t part) const;
  OpenFile& open(const std::string& name);
  /// kCorruption unless the file has those bytes.
  void check_place(size_t entry, const ItemLocation& place);
  /// The bytes in the file, with their checksums.
  ByteRange stored_bytes(size_t entry, uint64_t offset, uint64_t length, const ItemLocation& place);
  /// The bytes of an archive, transforms undone.
  ByteRange item(size_t entry, size_t part);
  bool is_in_blob(size_t entry, size_t part);
  TensorItem open_in_blob(size_t entry, size_t chunk);
  bool checksums_match(const MetadataFiles& metadata);

  std::shared_ptr<Storage> storage_;
  std::filesystem::path folder_;
  bool verify_;
  StoredMetadata stored_;
  std::optional<Checksums> checksums_;
  std::unordered_map<std::string, OpenFile> open_;
};

}  // namespace fsdp2::dcp::detail
