#pragma once

// The `.metadata` file: the public Metadata and where each item lies.

#include <fsdp2/dcp/dcp.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "dcp/file_names.h"

namespace fsdp2::dcp::detail {

struct ItemLocation {
  std::string file;
  uint64_t offset = 0, length = 0;
  bool present = false;  // the metadata name a place for it
};

struct StoredMetadata {
  Metadata metadata;
  /// Beside metadata.entries: one location per chunk of a tensor, one for a value.
  std::vector<std::vector<ItemLocation>> locations;
  /// Not written by this library, which leaves storage_meta out and names a version.
  bool foreign = false;

  /// Index into metadata.entries, or npos.
  size_t find(const std::string& fqn) const;
  /// Call after the entries changed.
  void index();
  static constexpr size_t npos = static_cast<size_t>(-1);

 private:
  std::unordered_map<std::string, size_t> by_name_;
};

std::string encode_metadata(const StoredMetadata& stored);
/// `what` names the file in errors. Names, numbers and shapes are checked, also against each other.
StoredMetadata decode_metadata(std::string_view pickle, const std::string& what);

StoredMetadata read_metadata(Storage& storage, const std::filesystem::path& folder);

}  // namespace fsdp2::dcp::detail
