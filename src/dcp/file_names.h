#pragma once

// Names of files in a checkpoint folder, and the small ones among them.

#include <fsdp2/dcp/storage.h>

#include <string>
#include <string_view>

namespace fsdp2::dcp::detail {

inline constexpr const char* kMetadataName = ".metadata";
inline constexpr const char* kChecksumsName = ".checksums";

/// kCorruption unless `name` is a plain file name, as every writer makes them.
void check_file_name(const std::string& name);
/// Whether a writer of checkpoints could have made it.
bool is_checkpoint_file(std::string_view name);
/// All of a file; kCorruption for an empty one, or one of 2 GiB and more.
std::string read_file(Storage& storage, const std::filesystem::path& folder, const std::string& name);

}  // namespace fsdp2::dcp::detail
