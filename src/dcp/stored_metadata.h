#pragma once

// The `.metadata` file: the public Metadata and where each item lies.

#include <fsdp2/dcp/dcp.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "dcp/file_names.h"

namespace fsdp2::dcp::detail {

struct ItemLocation {
  std::string file;
  /// Of a tensor in a safetensors blob: where the blob starts, and the bytes of the tensor; the blob's header says the
  /// rest. The metadata do not tell blobs from archives, the first bytes at `offset` do (see checkpoint_files.cpp).
  uint64_t offset = 0, length = 0;
  bool present = false;  // the metadata name a place for it
  /// What was done to the item's bytes, the last first, e.g. "stream.zstd/1"; `length` is that of the result.
  std::vector<std::string> transforms = {};
};

struct StoredMetadata {
  Metadata metadata;
  /// Beside metadata.entries: one location per chunk of a tensor, one for a value.
  std::vector<std::vector<ItemLocation>> locations;
  /// Written by another library than this one, which leaves storage_meta None and names a version.
  bool foreign = false;
  /// Of the format, as the writer gives it; empty where it does not (torch 2.4 and older).
  std::string version = {};

  /// Index into metadata.entries, or npos.
  size_t find(std::string_view fqn) const;
  /// Call after the entries changed. Returns the first entry whose key an earlier one has too, or npos.
  size_t index();
  static constexpr size_t npos = static_cast<size_t>(-1);

 private:
  size_t slot_of(std::string_view fqn) const;

  // Hash table of entry numbers, without a copy of the keys and without an allocation for each.
  std::vector<uint32_t> slots_;
};

std::string encode_metadata(const StoredMetadata& stored);
/// `what` names the file in errors. Names, numbers and shapes are checked, also against each other.
StoredMetadata decode_metadata(std::string_view pickle, const std::string& what);

/// What each rank of a save without collectives describes, as one: chunks are united; of a value or a chunk that
/// several ranks hold the first one counts. `names` are those of the files, in order, for errors. kCorruption naming
/// two of them where they contradict each other.
StoredMetadata merge_metadata(std::vector<StoredMetadata> parts, const std::vector<std::string>& names);

}  // namespace fsdp2::dcp::detail
