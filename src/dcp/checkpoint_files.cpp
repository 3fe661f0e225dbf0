#include "dcp/checkpoint_files.h"

#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include <algorithm>

#include "dcp/file_writer.h"
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

CheckpointFiles::CheckpointFiles(std::shared_ptr<Storage> storage, std::filesystem::path folder, bool verify)
    : storage_(storage ? std::move(storage) : local_storage()),
      folder_(std::move(folder)),
      verify_(verify),
      stored_(read_metadata(*storage_, folder_)) {
  if (verify_ && !stored_.foreign) read_checksums();
}

void CheckpointFiles::read_checksums() {
  const std::vector<std::string> names = storage_->list(folder_);
  if (!std::binary_search(names.begin(), names.end(), kChecksumsName)) return;
  checksums_.emplace(
      Checksums::decode(read_file(*storage_, folder_, kChecksumsName), (folder_ / kChecksumsName).string()));
  for (const std::string& name : checksums_->files()) {
    if (!name.ends_with(kMetadataName)) continue;
    const std::string content = read_file(*storage_, folder_, name);
    const std::vector<uint32_t> found = block_checksums(content);
    const auto recorded = checksums_->find(name, 0, content.size());
    FSDP2_CHECK(std::equal(found.begin(), found.end(), recorded.begin(), recorded.end()), kCorruption, "[dcp] ",
                (folder_ / name).string(), " has another checksum than ", kChecksumsName,
                " says; one of the two files was changed after saving");
  }
}

ByteRange CheckpointFiles::range(size_t entry, size_t part) {
  const ItemLocation& place = stored_.locations[entry][part];
  FSDP2_CHECK(place.present, kCorruption, "[dcp] ", (folder_ / kMetadataName).string(), ": ", fqn(entry),
              " has no storage entry for one of its parts");
  auto found = open_.find(place.file);
  if (found == open_.end()) {
    if (open_.size() >= kMaxOpenFiles) open_.clear();
    found = open_.emplace(place.file, storage_->open(folder_, place.file)).first;
  }
  std::span<const uint32_t> sums;
  if (checksums_) {
    sums = checksums_->find(place.file, place.offset, place.length);
    FSDP2_CHECK(!sums.empty() || place.length == 0, kCorruption, "[dcp] ", (folder_ / kChecksumsName).string(),
                " has no checksums of ", fqn(entry), " at offset ", place.offset, " of ", place.file,
                "; it does not belong to these metadata");
  }
  return ByteRange(found->second, place.offset, place.length, fqn(entry), sums);
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

TensorItem CheckpointFiles::open_chunk(size_t entry, size_t chunk) {
  const TensorEntry& info = *tensor(entry);
  return TensorItem(range(entry, chunk), verify_, info.dtype, info.chunks[chunk].sizes);
}

at::Tensor CheckpointFiles::read_whole(size_t entry) {
  check_tensor(entry);
  const TensorEntry& info = *tensor(entry);
  const at::Tensor whole = at::empty(info.sizes, at::TensorOptions().dtype(info.dtype));
  for (size_t i = 0; i < info.chunks.size(); ++i) {
    const Chunk& box = info.chunks[i];
    if (*checked_numel(box.sizes) == 0) continue;
    open_chunk(entry, i).copy_window({std::vector<int64_t>(box.sizes.size(), 0), box.sizes}, part_of(whole, box));
  }
  return whole;
}

void CheckpointFiles::check_item(size_t entry, size_t part) {
  const ByteRange bytes = range(entry, part);
  if (bytes.is_checked()) {
    std::string block(static_cast<size_t>(std::min<uint64_t>(kChecksumBlock, bytes.size())), '\0');
    for (uint64_t at = 0; at < bytes.size(); at += block.size())
      bytes.read(at, block.data(), static_cast<size_t>(std::min<uint64_t>(block.size(), bytes.size() - at)));
  }
  ZipReader(bytes, verify_).check_all();
  if (tensor(entry) == nullptr) {
    read_value(entry);
  } else {
    open_chunk(entry, part);
  }
}

Value CheckpointFiles::read_value(size_t entry) { return read_value_item(range(entry, 0), verify_); }

}  // namespace fsdp2::dcp::detail
