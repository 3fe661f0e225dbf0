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

std::shared_ptr<Storage> or_local(const std::shared_ptr<Storage>& storage) {
  return storage ? storage : local_storage();
}

}  // namespace

CheckpointFiles::CheckpointFiles(std::shared_ptr<Storage> storage, std::filesystem::path folder, bool verify,
                                 const MetadataFiles& metadata)
    : storage_(std::move(storage)),
      folder_(std::move(folder)),
      verify_(verify),
      stored_(decode_metadata(metadata, folder_)) {
  if (verify_ && metadata.checksums && !stored_.foreign) read_checksums(metadata);
}

CheckpointFiles::CheckpointFiles(std::shared_ptr<Storage> storage, std::filesystem::path folder, bool verify)
    : CheckpointFiles(or_local(storage), folder, verify, read_metadata_files(*or_local(storage), folder)) {}

void CheckpointFiles::read_checksums(const MetadataFiles& metadata) {
  checksums_.emplace(Checksums::decode(*metadata.checksums, (folder_ / kChecksumsName).string()));
  for (const auto& [name, content] : metadata.metadata) {
    const std::vector<uint32_t> found = block_checksums(content);
    const auto recorded = checksums_->find(name, 0, content.size());
    FSDP2_CHECK(std::equal(found.begin(), found.end(), recorded.begin(), recorded.end()), kCorruption, "[dcp] ",
                (folder_ / name).string(), " has another checksum than ", kChecksumsName,
                " says; one of the two files was changed after saving");
  }
}

const ItemLocation& CheckpointFiles::place_of(size_t entry, size_t part) const {
  const ItemLocation& place = stored_.locations[entry][part];
  FSDP2_CHECK(place.present, kCorruption, "[dcp] ", (folder_ / kMetadataName).string(), ": ", fqn(entry),
              " has no storage entry for one of its parts");
  return place;
}

const std::shared_ptr<const InputFile>& CheckpointFiles::file_of(const ItemLocation& place) {
  auto found = open_.find(place.file);
  if (found == open_.end()) {
    if (open_.size() >= kMaxOpenFiles) open_.clear();
    found = open_.emplace(place.file, storage_->open(folder_, place.file)).first;
  }
  return found->second;
}

ByteRange CheckpointFiles::range(size_t entry, size_t part) {
  const ItemLocation& place = place_of(entry, part);
  std::span<const uint32_t> sums;
  if (checksums_) {
    sums = checksums_->find(place.file, place.offset, place.length);
    FSDP2_CHECK(!sums.empty() || place.length == 0, kCorruption, "[dcp] ", (folder_ / kChecksumsName).string(),
                " has no checksums of ", fqn(entry), " at offset ", place.offset, " of ", place.file,
                "; it does not belong to these metadata");
  }
  return ByteRange(file_of(place), place.offset, place.length, fqn(entry), sums);
}

void CheckpointFiles::check_tensor(size_t entry) const {
  const TensorEntry& info = *tensor(entry);
  if (*checked_numel(info.sizes) == 0) return;  // valid: the decoder looked
  const std::string fault = cover_fault(info.sizes, info.chunks);
  FSDP2_CHECK(fault.empty(), kCorruption, "[dcp] ", (folder_ / kMetadataName).string(), ": ", fqn(entry), " of shape ",
              shape_text(info.sizes), ": ", fault, "; the checkpoint is damaged or was saved by part of the ranks");
}

void CheckpointFiles::check_chunk(size_t entry, size_t chunk) {
  const TensorEntry& info = *tensor(entry);
  const int64_t elements = *checked_numel(info.chunks[chunk].sizes);
  if (elements == 0) return;
  const ItemLocation& place = place_of(entry, chunk);
  const InputFile& file = *file_of(place);
  FSDP2_CHECK(place.offset <= file.size() && place.length <= file.size() - place.offset, kCorruption, "[dcp] ",
              file.name(), " (", fqn(entry), "): the metadata say ", place.length, " bytes at offset ", place.offset,
              ", the file has ", file.size(), "; it was cut or belongs to another checkpoint");
  const auto bytes = static_cast<uint64_t>(elements) * c10::elementSize(info.dtype);
  FSDP2_CHECK(bytes <= place.length || !place.transforms.empty(), kCorruption, "[dcp] ",
              (folder_ / kMetadataName).string(), ": ", fqn(entry), " of shape ", shape_text(info.sizes),
              ": the chunk at ", shape_text(info.chunks[chunk].offsets), " needs ", bytes, " bytes, its item has ",
              place.length);
}

TensorItem CheckpointFiles::open_chunk(size_t entry, size_t chunk) {
  const TensorEntry& info = *tensor(entry);
  return TensorItem(range(entry, chunk), verify_, info.dtype, info.chunks[chunk].sizes);
}

at::Tensor CheckpointFiles::read_whole(size_t entry) {
  check_tensor(entry);
  const TensorEntry& info = *tensor(entry);
  for (size_t i = 0; i < info.chunks.size(); ++i) check_chunk(entry, i);
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
