#include "dcp/checkpoint_files.h"

#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include "dcp/geometry.h"
#include "dcp/scalar_types.h"

namespace fsdp2::dcp::detail {
namespace {

constexpr size_t kMaxOpenFiles = 64;

at::Tensor part_of(at::Tensor tensor, const Chunk& box) {
  for (size_t d = 0; d < box.sizes.size(); ++d)
    tensor = tensor.narrow(static_cast<int64_t>(d), box.offsets[d], box.sizes[d]);
  return tensor;
}

}  // namespace

CheckpointFiles::CheckpointFiles(std::filesystem::path folder, bool verify)
    : folder_(std::move(folder)), verify_(verify), stored_(read_metadata(folder_)) {}

ByteRange CheckpointFiles::range(size_t entry, size_t part) {
  const ItemLocation& place = stored_.locations[entry][part];
  FSDP2_CHECK(place.present, kCorruption, "[dcp] ", (folder_ / kMetadataName).string(), ": ", fqn(entry),
              " has no storage entry for one of its parts");
  auto found = open_.find(place.file);
  if (found == open_.end()) {
    if (open_.size() >= kMaxOpenFiles) open_.clear();
    found = open_.emplace(place.file, std::make_shared<FileReader>(folder_, place.file)).first;
  }
  return ByteRange(found->second, place.offset, place.length, fqn(entry));
}

void CheckpointFiles::check_tensor(size_t entry) {
  const TensorEntry& info = *tensor(entry);
  const std::string where =
      c10::str("[dcp] ", (folder_ / kMetadataName).string(), ": ", fqn(entry), " of shape ", shape_text(info.sizes));
  const int64_t numel = *checked_numel(info.sizes);  // valid: the decoder looked
  if (numel == 0) return;
  const std::string fault = cover_fault(info.sizes, info.chunks);
  FSDP2_CHECK(fault.empty(), kCorruption, where, ": ", fault,
              "; the checkpoint is damaged or was saved by part of the ranks");
  for (size_t i = 0; i < info.chunks.size(); ++i) {
    const int64_t elements = *checked_numel(info.chunks[i].sizes);
    if (elements == 0) continue;
    const ByteRange item = range(entry, i);
    const auto bytes = static_cast<uint64_t>(elements) * c10::elementSize(info.dtype);
    FSDP2_CHECK(bytes <= item.size(), kCorruption, where, ": the chunk at ", shape_text(info.chunks[i].offsets),
                " needs ", bytes, " bytes, its item has ", item.size());
  }
}

at::Tensor CheckpointFiles::read_chunk(size_t entry, size_t chunk) {
  const TensorEntry& info = *tensor(entry);
  const Chunk& box = info.chunks[chunk];
  const at::Tensor read = read_tensor_item(range(entry, chunk), verify_, info.dtype, *checked_numel(box.sizes));
  FSDP2_CHECK(read.sizes() == at::IntArrayRef(box.sizes), kCorruption, "[dcp] ", folder_.string(), ": the item of ",
              fqn(entry), " at ", shape_text(box.offsets), " has the shape ", shape_text(read.sizes().vec()),
              ", the metadata say ", shape_text(box.sizes));
  return read;
}

at::Tensor CheckpointFiles::read_whole(size_t entry) {
  check_tensor(entry);
  const TensorEntry& info = *tensor(entry);
  if (info.chunks.size() == 1 && info.chunks[0].sizes == info.sizes && *checked_numel(info.sizes) > 0)
    return read_chunk(entry, 0).contiguous();
  const at::Tensor whole = at::empty(info.sizes, at::TensorOptions().dtype(info.dtype));
  for (size_t i = 0; i < info.chunks.size(); ++i) {
    if (*checked_numel(info.chunks[i].sizes) > 0) part_of(whole, info.chunks[i]).copy_(read_chunk(entry, i));
  }
  return whole;
}

Value CheckpointFiles::read_value(size_t entry) { return read_value_item(range(entry, 0), verify_); }

}  // namespace fsdp2::dcp::detail
