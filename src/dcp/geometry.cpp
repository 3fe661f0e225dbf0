#include "dcp/geometry.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>
#include <set>

namespace fsdp2::dcp::detail {

std::optional<int64_t> checked_numel(const std::vector<int64_t>& sizes) {
  int64_t numel = 1;
  bool overflow = false;
  for (int64_t size : sizes) {
    if (size < 0) return std::nullopt;
    overflow |= __builtin_mul_overflow(numel, std::max<int64_t>(size, 1), &numel);
  }
  if (overflow) return std::nullopt;  // also for empty tensors: no honest shape is that big
  return std::find(sizes.begin(), sizes.end(), 0) == sizes.end() ? numel : 0;
}

std::optional<Chunk> intersect(const Chunk& a, const Chunk& b) {
  Chunk result;
  for (size_t d = 0; d < a.offsets.size(); ++d) {
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return std::nullopt;
    result.offsets.push_back(begin);
    result.sizes.push_back(end - begin);
  }
  return result;
}

std::string chunk_fault(const std::vector<int64_t>& sizes, const Chunk& chunk) {
  if (chunk.offsets.size() != sizes.size() || chunk.sizes.size() != sizes.size()) {
    return c10::str("a chunk has ", chunk.offsets.size(), " offsets and ", chunk.sizes.size(), " sizes");
  }
  for (size_t d = 0; d < sizes.size(); ++d) {
    const int64_t offset = chunk.offsets[d], size = chunk.sizes[d];
    if (offset < 0 || size < 0 || offset > sizes[d] || size > sizes[d] - offset) {
      return c10::str("the chunk at ", shape_text(chunk.offsets), " of size ", shape_text(chunk.sizes),
                      " leaves the tensor");
    }
  }
  return {};
}

std::string cover_fault(const std::vector<int64_t>& sizes, const std::vector<Chunk>& chunks) {
  const int64_t numel = checked_numel(sizes).value_or(0);
  if (sizes.empty()) {
    if (chunks.size() != 1) return c10::str(chunks.size(), " chunks for a tensor without dimensions");
    return {};
  }
  std::vector<const Chunk*> order;
  int64_t volume = 0;
  for (const Chunk& chunk : chunks) {
    const int64_t part = checked_numel(chunk.sizes).value_or(0);
    if (part == 0) continue;
    order.push_back(&chunk);
    if (__builtin_add_overflow(volume, part, &volume)) return "its chunks overlap";
  }
  // Sweep along the dimension with the most cuts: few boxes share a stretch of it.
  size_t sweep = 0, most = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    std::set<int64_t> cuts;
    for (const Chunk* chunk : order) cuts.insert(chunk->offsets[d]);
    if (cuts.size() > most) {
      most = cuts.size();
      sweep = d;
    }
  }
  std::sort(order.begin(), order.end(),
            [&](const Chunk* a, const Chunk* b) { return a->offsets[sweep] < b->offsets[sweep]; });
  for (size_t i = 0; i < order.size(); ++i) {
    const int64_t end = order[i]->offsets[sweep] + order[i]->sizes[sweep];
    for (size_t j = i + 1; j < order.size() && order[j]->offsets[sweep] < end; ++j) {
      if (intersect(*order[i], *order[j])) {
        return c10::str("the chunks at ", shape_text(order[i]->offsets), " and ", shape_text(order[j]->offsets),
                        " overlap");
      }
    }
  }
  if (volume != numel) return c10::str("its chunks hold ", volume, " of ", numel, " elements");
  return {};
}

std::string shape_text(const std::vector<int64_t>& sizes) { return c10::str("[", c10::Join(", ", sizes), "]"); }

}  // namespace fsdp2::dcp::detail
