#include "dcp/checkpoint_files.h"

#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include <algorithm>
#include <cstring>

#include "dcp/file_writer.h"
#include "dcp/geometry.h"
#include "dcp/local_parts.h"
#include "dcp/scalar_types.h"
#include "dcp/transforms.h"

namespace fsdp2::dcp::detail {
namespace {

constexpr size_t kMaxOpenFiles = 64;
constexpr uint64_t kSlabBytes = uint64_t{1} << 20;  // of an item that is only checked

}  // namespace

CheckpointFiles::CheckpointFiles(std::shared_ptr<Storage> storage, std::filesystem::path folder, bool verify,
                                 const MetadataFiles& metadata)
    : storage_(std::move(storage)), folder_(std::move(folder)), verify_(verify) {
  const bool compare = verify_ && metadata.checksums.has_value();
  try {
    stored_ = decode_metadata(metadata, folder_);
  } catch (const Error& error) {
    // Damage can look like anything, e.g. like a class that is not known.
    if (compare && !checksums_match(metadata)) {
      FSDP2_THROW(kCorruption, error.what_without_backtrace(), "; the file also has another checksum than ",
                  kChecksumsName, " says: it was changed after saving");
    }
    throw;
  }
  FSDP2_CHECK(!compare || stored_.foreign || checksums_match(metadata), kCorruption, "[dcp] the metadata in ",
              folder_.string(), " have another checksum than ", kChecksumsName,
              " says; one of the two was changed after saving");
}

CheckpointFiles::CheckpointFiles(std::shared_ptr<Storage> storage, std::filesystem::path folder, bool verify)
    : CheckpointFiles(or_local(storage), folder, verify, read_metadata_files(*or_local(storage), folder)) {}

/// Reads `.checksums` and compares those of the metadata.
bool CheckpointFiles::checksums_match(const MetadataFiles& metadata) {
  checksums_.emplace(Checksums::decode(*metadata.checksums, (folder_ / kChecksumsName).string()));
  for (const std::string& name : checksums_->files()) {
    const bool was_read = std::any_of(metadata.metadata.begin(), metadata.metadata.end(),
                                      [&](const auto& file) { return file.first == name; });
    FSDP2_CHECK(was_read || !name.ends_with(kMetadataName), kCorruption, "[dcp] ", (folder_ / name).string(),
                " is missing: ", kChecksumsName, " has its checksum");
  }
  return std::all_of(metadata.metadata.begin(), metadata.metadata.end(),
                     [&](const auto& file) { return checksums_->match(file.first, file.second); });
}

const ItemLocation& CheckpointFiles::location(size_t entry, size_t part) const {
  const ItemLocation& place = stored_.locations[entry][part];
  FSDP2_CHECK(place.present, kCorruption, "[dcp] ", (folder_ / kMetadataName).string(), ": ", fqn(entry),
              " has no storage entry for one of its parts");
  return place;
}

CheckpointFiles::OpenFile& CheckpointFiles::open(const std::string& name) {
  auto found = open_.find(name);
  if (found == open_.end()) {
    if (open_.size() >= kMaxOpenFiles) open_.clear();
    found = open_.emplace(name, OpenFile{storage_->open(folder_, name), {}, {}, 0}).first;
  }
  return found->second;
}

ByteRange CheckpointFiles::stored_bytes(size_t entry, uint64_t offset, uint64_t length, const ItemLocation& place) {
  BlockChecksums checksums;
  if (checksums_) {
    checksums = checksums_->find(place.file, offset, length);
    FSDP2_CHECK(!checksums.sums.empty() || length == 0, kCorruption, "[dcp] ", (folder_ / kChecksumsName).string(),
                " has no checksums of ", fqn(entry), " at offset ", offset, " of ", place.file,
                "; it does not belong to these metadata");
  }
  return ByteRange(open(place.file).file, offset, length, fqn(entry), checksums);
}

ByteRange CheckpointFiles::item(size_t entry, size_t part) {
  const ItemLocation& place = location(entry, part);
  ByteRange stored = stored_bytes(entry, place.offset, place.length, place);
  if (place.transforms.empty()) return stored;
  uint64_t most = most_value_bytes(place.length, place.transforms);
  if (const TensorEntry* info = tensor(entry)) {
    const int64_t elements = *checked_numel(info->chunks[part].sizes);
    most = static_cast<uint64_t>(elements) * c10::elementSize(info->dtype) + kArchiveOverhead;
  }
  return undo_transforms(stored, place.transforms, most);
}

void CheckpointFiles::check_place(size_t entry, const ItemLocation& place) {
  const uint64_t size = open(place.file).file->size();
  FSDP2_CHECK(place.offset <= size && place.length <= size - place.offset, kCorruption, "[dcp] ",
              (folder_ / place.file).string(), " (", fqn(entry), "): the metadata say ", place.length,
              " bytes at offset ", place.offset, ", the file has ", size,
              "; it was cut or belongs to another checkpoint");
}

/// Nothing in the metadata tells: the first bytes of what should be an archive do.
bool CheckpointFiles::is_in_blob(size_t entry, size_t part) {
  const ItemLocation& place = location(entry, part);
  if (!place.transforms.empty()) return false;
  OpenFile& file = open(place.file);
  if (!file.has_blob) {
    static constexpr char kArchive[] = {'P', 'K', 3, 4};
    char start[sizeof(kArchive)];
    check_place(entry, place);
    const uint64_t left = file.file->size() - place.offset;
    if (left >= sizeof(start)) file.file->read(place.offset, start, sizeof(start));
    file.has_blob = left >= sizeof(start) && std::memcmp(start, kArchive, sizeof(start)) != 0;
  }
  return *file.has_blob;
}

TensorItem CheckpointFiles::open_in_blob(size_t entry, size_t chunk) {
  const ItemLocation& place = location(entry, chunk);
  OpenFile& file = open(place.file);
  check_place(entry, place);
  ByteRange bytes = stored_bytes(entry, place.offset, file.file->size() - place.offset, place);
  if (!file.blob || file.blob_offset != place.offset) {
    file.blob = std::make_shared<const SafetensorsHeader>(read_safetensors_header(bytes));
    file.blob_offset = place.offset;
  }
  const SafetensorsTensor* found = file.blob->find(fqn(entry));
  const auto where = [&] {
    return c10::str("[dcp] ", bytes.what(), ": the safetensors data at offset ", place.offset, " of the file ");
  };
  FSDP2_CHECK(found != nullptr, kCorruption, where(), "have no tensor of that name");
  const TensorEntry& info = *tensor(entry);
  FSDP2_CHECK(found->dtype == info.dtype, kCorruption, where(), "hold it as ", dtype_name(found->dtype),
              ", the metadata say ", dtype_name(info.dtype));
  FSDP2_CHECK(found->sizes == info.chunks[chunk].sizes, kCorruption, where(), "hold it with the shape ",
              shape_text(found->sizes), ", the metadata say ", shape_text(info.chunks[chunk].sizes));
  const uint64_t begin = found->begin;
  return TensorItem(std::move(bytes), begin, info.dtype, info.chunks[chunk].sizes);
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
  const ItemLocation& place = location(entry, chunk);
  check_place(entry, place);
  const auto bytes = static_cast<uint64_t>(elements) * c10::elementSize(info.dtype);
  FSDP2_CHECK(bytes <= most_undone_bytes(place.length, place.transforms), kCorruption, "[dcp] ",
              (folder_ / kMetadataName).string(), ": ", fqn(entry), " of shape ", shape_text(info.sizes),
              ": the chunk at ", shape_text(info.chunks[chunk].offsets), " needs ", bytes, " bytes, its item has ",
              place.length);
}

TensorItem CheckpointFiles::open_chunk(size_t entry, size_t chunk) {
  if (is_in_blob(entry, chunk)) return open_in_blob(entry, chunk);
  const TensorEntry& info = *tensor(entry);
  return TensorItem(item(entry, chunk), verify_, info.dtype, info.chunks[chunk].sizes);
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
  const TensorEntry* info = tensor(entry);
  if (info != nullptr && is_in_blob(entry, part)) {
    open_in_blob(entry, part).whole();
    return;
  }
  const ItemLocation& place = location(entry, part);
  const ByteRange stored = stored_bytes(entry, place.offset, place.length, place);
  if (stored.is_checked()) {
    std::string block(static_cast<size_t>(std::min<uint64_t>(kSlabBytes, stored.size())), '\0');
    for (uint64_t at = 0; at < stored.size(); at += block.size())
      stored.read(at, block.data(), static_cast<size_t>(std::min<uint64_t>(block.size(), stored.size() - at)));
  }
  const ByteRange bytes = item(entry, part);
  ZipReader(bytes, verify_).check_all();
  if (info == nullptr) {
    read_value(entry);
  } else {
    open_chunk(entry, part);
  }
}

Value CheckpointFiles::read_value(size_t entry) { return read_value_item(item(entry, 0), verify_); }

}  // namespace fsdp2::dcp::detail
