#pragma once

// The keys of a checkpoint of any format, and their tensors read in boxes.

#include <fsdp2/dcp/convert.h>
#include <fsdp2/dcp/dcp.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dcp/flatten.h"

namespace fsdp2::dcp::detail {

class TensorSource {
 public:
  struct Item {
    std::string key;
    Path path;                          // {key} where the format does not nest
    std::optional<TensorEntry> tensor;  // none: a plain value
    uint64_t bytes = 0;                 // of the elements; of a value, of its item
  };

  virtual ~TensorSource() = default;
  Format format() const { return format_; }
  const std::vector<Item>& items() const { return items_; }

  /// Box `box` of a tensor, plain and contiguous, on CPU. kCorruption unless its chunks cover the tensor.
  virtual at::Tensor read(size_t item, const Chunk& box) = 0;
  virtual Value value(size_t item) = 0;
  /// Names of the files that hold an item.
  virtual std::vector<std::string> files_of(size_t item) const = 0;
  /// Fills all but the items.
  virtual void describe(CheckpointContents& info) const = 0;

 protected:
  explicit TensorSource(Format format) : format_(format) {}
  Format format_;
  std::vector<Item> items_;
};

/// What lies at `path`. kNotFound if there is nothing, kInvalidArgument if it is something else.
Format detect_format(const std::filesystem::path& path);
std::unique_ptr<TensorSource> open_source(const std::filesystem::path& path, Format format, bool verify);

std::unique_ptr<TensorSource> open_dcp(const std::filesystem::path& folder, bool verify);
/// A folder, or one file (whatever its name).
std::unique_ptr<TensorSource> open_safetensors(const std::filesystem::path& path);
/// Reads all of it.
std::unique_ptr<TensorSource> open_torch_save(const std::filesystem::path& file, bool verify);

/// Cuts a box into boxes of at most `max_bytes` that follow each other in row-major order: rows of its first
/// dimension, parts of a row where that is too big.
template <class Visit>
void for_each_piece(const Chunk& box, int64_t element_size, int64_t max_bytes, const Visit& visit) {
  int64_t bytes = element_size;
  for (int64_t size : box.sizes) bytes *= size;
  if (bytes == 0) return;
  size_t d = 0;
  while (d < box.sizes.size() && box.sizes[d] == 1) ++d;
  if (bytes <= max_bytes || d == box.sizes.size()) return visit(box);
  const int64_t row = bytes / box.sizes[d], step = std::max<int64_t>(1, max_bytes / row);
  for (int64_t begin = 0; begin < box.sizes[d]; begin += step) {
    Chunk piece = box;
    piece.offsets[d] += begin;
    piece.sizes[d] = std::min(step, box.sizes[d] - begin);
    for_each_piece(piece, element_size, max_bytes, visit);
  }
}

inline Chunk whole_box(const std::vector<int64_t>& sizes) { return {std::vector<int64_t>(sizes.size(), 0), sizes}; }

/// What a conversion holds at a time.
inline constexpr int64_t kPieceBytes = int64_t{1} << 20;

}  // namespace fsdp2::dcp::detail
