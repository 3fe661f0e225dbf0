#pragma once

// Modules of the classes in `.metadata`.

#include <string_view>

namespace fsdp2::dcp::detail {

inline constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";
inline constexpr std::string_view kOldMetadataModule = "torch.distributed._shard.sharded_tensor.metadata";  // to 2.2
inline constexpr std::string_view kFileModule = "torch.distributed.checkpoint.filesystem";

}  // namespace fsdp2::dcp::detail
