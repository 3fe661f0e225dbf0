#pragma once

// This rank's files of a checkpoint.

#include <fsdp2/dcp/dcp.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "dcp/checksums.h"
#include "dcp/save_plan.h"
#include "dcp/stored_metadata.h"

namespace fsdp2::dcp::detail {

/// How far writing is, in bytes of this rank.
struct WriteProgress {
  std::atomic<uint64_t> done{0}, total{0};
};

/// Where one part of an item went, as the metadata tell it.
struct WrittenPart {
  uint64_t item = 0, part = 0;  // in the plan
  uint64_t offset = 0, length = 0;
};
/// Bytes that have checksums: an item, or a safetensors blob with all tensors of a file.
struct WrittenBytes {
  uint64_t offset = 0, length = 0;
  std::vector<uint32_t> checksums;
};
struct WrittenFile {
  std::string name;
  std::vector<WrittenPart> parts;
  std::vector<WrittenBytes> bytes;
};

/// What is done to every item.
std::vector<std::string> transforms_of(const SaveOptions& options);

/// Writes what the plan gives to `rank`; durable when it returns.
std::vector<WrittenFile> write_files(Storage& storage, const std::string& place, int rank, const SavePlan& plan,
                                     const std::vector<SaveItem>& items, const SaveOptions& options,
                                     WriteProgress* progress);

}  // namespace fsdp2::dcp::detail
