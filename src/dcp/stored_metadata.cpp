#include "dcp/stored_metadata.h"

#include <fsdp2/error.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <optional>
#include <random>
#include <unordered_map>

#include "dcp/geometry.h"
#include "dcp/scalar_types.h"

namespace fsdp2::dcp::detail {
namespace {

constexpr uint32_t kNoEntry = UINT32_MAX;

class Merger {
 public:
  Merger(std::vector<StoredMetadata> parts, const std::vector<std::string>& names)
      : parts_(std::move(parts)), names_(names) {}

  StoredMetadata run() {
    size_t entries = 0;
    for (const StoredMetadata& part : parts_) entries += part.metadata.entries.size();
    by_name_.reserve(entries);
    for (size_t i = 0; i < parts_.size(); ++i) {
      for (size_t k = 0; k < parts_[i].metadata.entries.size(); ++k) add(i, k);
      result_.metadata.paths.merge(parts_[i].metadata.paths);  // the lowest rank's
      result_.foreign |= parts_[i].foreign;
    }
    for (size_t i = 0; i < origins_.size(); ++i) {
      if (auto* tensor = std::get_if<TensorEntry>(&result_.metadata.entries[i].second))
        unite_chunks(i, *tensor, result_.locations[i]);
    }
    result_.index();
    return std::move(result_);
  }

 private:
  void add(size_t part, size_t entry) {
    auto& [fqn, content] = parts_[part].metadata.entries[entry];
    auto& places = parts_[part].locations[entry];
    const auto [known, fresh] = by_name_.try_emplace(fqn, origins_.size());
    if (fresh) {
      result_.metadata.entries.emplace_back(fqn, std::move(content));
      result_.locations.push_back(std::move(places));
      origins_.emplace_back(result_.locations.back().size(), part);
      return;
    }
    auto& kept = result_.metadata.entries[known->second].second;
    std::vector<size_t>& origins = origins_[known->second];
    auto* here = std::get_if<TensorEntry>(&kept);
    auto* there = std::get_if<TensorEntry>(&content);
    const size_t first = origins.empty() ? 0 : origins[0];
    if ((here == nullptr) != (there == nullptr))
      disagree(fqn, first, here ? "a tensor" : "a value", part, there ? "a tensor" : "a value");
    if (here == nullptr) return;  // a value that each rank wrote
    if (here->dtype != there->dtype)
      disagree(fqn, first, std::string(dtype_name(here->dtype)), part, std::string(dtype_name(there->dtype)));
    if (here->sizes != there->sizes)
      disagree(fqn, first, "of shape " + shape_text(here->sizes), part, "of shape " + shape_text(there->sizes));
    for (size_t i = 0; i < there->chunks.size(); ++i) {
      here->chunks.push_back(std::move(there->chunks[i]));
      result_.locations[known->second].push_back(std::move(places[i]));
      origins.push_back(part);
    }
  }

  /// Keeps one of the chunks that several ranks wrote, that of the lowest rank.
  void unite_chunks(size_t entry, TensorEntry& tensor, std::vector<ItemLocation>& places) {
    const std::vector<size_t>& origins = origins_[entry];
    std::vector<Chunk>& chunks = tensor.chunks;
    std::vector<size_t> order(chunks.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return chunks[a].offsets < chunks[b].offsets; });
    std::vector<Chunk> united;
    std::vector<ItemLocation> united_places;
    size_t last = 0;
    for (size_t i : order) {
      const bool again = !united.empty() && united.back().offsets == chunks[i].offsets;
      if (again && origins[i] != origins[last]) {
        if (united.back().sizes == chunks[i].sizes) continue;
        disagree(result_.metadata.entries[entry].first, origins[last],
                 "at " + shape_text(chunks[i].offsets) + " of size " + shape_text(united.back().sizes), origins[i],
                 "there of size " + shape_text(chunks[i].sizes));
      }
      last = i;
      united.push_back(std::move(chunks[i]));
      united_places.push_back(std::move(places[i]));
    }
    chunks = std::move(united);
    places = std::move(united_places);
  }

  [[noreturn]] void disagree(const std::string& fqn, size_t first, const std::string& here, size_t second,
                             const std::string& there) const {
    FSDP2_THROW(kCorruption, "[dcp] ", fqn, " is ", here, " in ", names_[first], " and ", there, " in ", names_[second],
                "; the files are not of one save");
  }

  std::vector<StoredMetadata> parts_;
  const std::vector<std::string>& names_;
  StoredMetadata result_;
  std::unordered_map<std::string_view, size_t> by_name_;  // keys in parts_
  std::vector<std::vector<size_t>> origins_;              // the part that each location came from
};

}  // namespace

size_t StoredMetadata::slot_of(std::string_view fqn) const {
  // The seed keeps files from choosing keys that meet in one slot.
  static const uint64_t seed = std::random_device()();
  size_t slot = XXH3_64bits_withSeed(fqn.data(), fqn.size(), seed) & (slots_.size() - 1);
  while (slots_[slot] != kNoEntry && metadata.entries[slots_[slot]].first != fqn)
    slot = (slot + 1) & (slots_.size() - 1);
  return slot;
}
size_t StoredMetadata::find(std::string_view fqn) const {
  if (slots_.empty()) return npos;
  const uint32_t entry = slots_[slot_of(fqn)];
  return entry == kNoEntry ? npos : entry;
}
size_t StoredMetadata::index() {
  size_t twice = npos;
  slots_.assign(std::bit_ceil(2 * metadata.entries.size() + 1), kNoEntry);
  for (size_t i = 0; i < metadata.entries.size(); ++i) {
    uint32_t& slot = slots_[slot_of(metadata.entries[i].first)];
    if (slot == kNoEntry) {
      slot = static_cast<uint32_t>(i);
    } else if (twice == npos) {
      twice = i;
    }
  }
  return twice;
}

StoredMetadata merge_metadata(std::vector<StoredMetadata> parts, const std::vector<std::string>& names) {
  if (parts.size() == 1) return std::move(parts[0]);
  return Merger(std::move(parts), names).run();
}

}  // namespace fsdp2::dcp::detail
