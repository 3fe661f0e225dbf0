#pragma once

// Names of files in a checkpoint folder, and the small ones among them.

#include <fsdp2/dcp/storage.h>

#include <memory>
#include <string>
#include <string_view>

namespace fsdp2::dcp::detail {

inline constexpr const char* kMetadataName = ".metadata";
inline constexpr const char* kChecksumsName = ".checksums";
// What local_storage() puts behind the name of a checkpoint that is not complete yet, and behind that the one that it
// replaces, for a moment, where the file system cannot swap two folders.
inline constexpr std::string_view kStagingMark = ".staging-", kOldMark = "-old";

/// Without folders, as every writer makes them.
bool is_plain_file_name(std::string_view name);
/// kCorruption unless it is one.
void check_file_name(const std::string& name);
/// Whether a writer of checkpoints could have made it.
bool is_checkpoint_file(std::string_view name);
/// The storage that an option names, or local_storage().
std::shared_ptr<Storage> or_local(const std::shared_ptr<Storage>& storage);
/// All of a file; kCorruption for an empty one, or one of 2 GiB and more.
std::string read_file(Storage& storage, const std::filesystem::path& folder, const std::string& name);

}  // namespace fsdp2::dcp::detail
