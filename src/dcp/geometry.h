#pragma once

// Boxes of tensors: where saved chunks and local shards meet.

#include <fsdp2/dcp/dcp.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp2::dcp::detail {

/// Product of sizes; nullopt where it does not fit 63 bits or a size is negative.
std::optional<int64_t> checked_numel(const std::vector<int64_t>& sizes);

/// Where two boxes meet, relative to the tensor; nullopt where they do not. Boxes without
/// dimensions always meet.
std::optional<Chunk> intersect(const Chunk& a, const Chunk& b);

/// The same box, counted from `origin`.
Chunk relative_to(Chunk box, const std::vector<int64_t>& origin);

/// The box of a tensor, as a view; the tensor itself where it is the box.
at::Tensor part_of(at::Tensor tensor, const Chunk& box);

/// Says what is wrong with one chunk of a tensor of `sizes`, or nothing.
std::string chunk_fault(const std::vector<int64_t>& sizes, const Chunk& chunk);
/// Says which chunks overlap, or that they leave a hole, or nothing. Chunks are valid each for
/// itself.
std::string cover_fault(const std::vector<int64_t>& sizes, const std::vector<Chunk>& chunks);

/// "[2, 3]".
std::string shape_text(const std::vector<int64_t>& sizes);

}  // namespace fsdp2::dcp::detail
