#pragma once

// The files of a checkpoint folder that say where everything is.

#include <fsdp2/dcp/storage.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dcp/stored_metadata.h"

namespace fsdp2::dcp::detail {

/// As they were read. Rank 0 reads them and sends them to the others: what one rank finds, all find.
struct MetadataFiles {
  std::vector<std::pair<std::string, std::string>> metadata;  // name and content: `.metadata`, or one for each rank
  std::optional<std::string> checksums;

  std::string encode() const;
  static MetadataFiles decode(const std::string& message);
};

/// `.metadata`, or all `__<rank>.metadata` where there is none. kNotFound if `folder` holds neither.
MetadataFiles read_metadata_files(Storage& storage, const std::filesystem::path& folder);
/// `folder` is for messages.
StoredMetadata decode_metadata(const MetadataFiles& files, const std::filesystem::path& folder);
StoredMetadata read_metadata(Storage& storage, const std::filesystem::path& folder);

}  // namespace fsdp2::dcp::detail
