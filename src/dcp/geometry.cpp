#include "dcp/geometry.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
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

Chunk relative_to(Chunk box, const std::vector<int64_t>& origin) {
  for (size_t d = 0; d < box.offsets.size(); ++d) box.offsets[d] -= origin[d];
  return box;
}

at::Tensor part_of(at::Tensor tensor, const Chunk& box) {
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    if (box.offsets[d] != 0 || box.sizes[d] != tensor.size(dim))
      tensor = tensor.narrow(dim, box.offsets[d], box.sizes[d]);
  }
  return tensor;
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

namespace {

/// Whether boxes tile the tensor exactly. The indicator functions of boxes add up to that of the tensor just where
/// their corners do, counted with alternating signs: no pair of boxes has to be compared. `cut` are the dimensions in
/// which some box is not as long as the tensor.
bool tiles(const std::vector<int64_t>& sizes, const std::vector<const Chunk*>& boxes, const std::vector<size_t>& cut) {
  std::map<std::vector<int64_t>, int64_t> corners;
  const auto add = [&](const std::vector<int64_t>& begin, const std::vector<int64_t>& end, int64_t weight) {
    std::vector<int64_t> corner(cut.size());
    for (size_t which = 0; which < size_t{1} << cut.size(); ++which) {
      int64_t sign = weight;
      for (size_t i = 0; i < cut.size(); ++i) {
        const bool far = (which >> i & 1) != 0;
        corner[i] = far ? end[i] : begin[i];
        if (far) sign = -sign;
      }
      const auto place = corners.try_emplace(corner, 0).first;
      place->second += sign;
      if (place->second == 0) corners.erase(place);
    }
  };
  std::vector<int64_t> begin(cut.size()), end(cut.size());
  for (const Chunk* box : boxes) {
    for (size_t i = 0; i < cut.size(); ++i) {
      begin[i] = box->offsets[cut[i]];
      end[i] = begin[i] + box->sizes[cut[i]];
    }
    add(begin, end, 1);
  }
  for (size_t i = 0; i < cut.size(); ++i) {
    begin[i] = 0;
    end[i] = sizes[cut[i]];
  }
  add(begin, end, -1);
  return corners.empty();
}

/// The first overlap that a sweep along the dimension with the most cuts finds; nothing after a while, as a file can
/// ask for very many comparisons.
std::string overlap_in(std::vector<const Chunk*> boxes, const std::vector<size_t>& cut) {
  size_t sweep = 0, most = 0;
  for (const size_t d : cut) {
    std::set<int64_t> cuts;
    for (const Chunk* box : boxes) cuts.insert(box->offsets[d]);
    if (cuts.size() > most) {
      most = cuts.size();
      sweep = d;
    }
  }
  std::sort(boxes.begin(), boxes.end(),
            [&](const Chunk* a, const Chunk* b) { return a->offsets[sweep] < b->offsets[sweep]; });
  size_t left = 1000000;
  for (size_t i = 0; i < boxes.size(); ++i) {
    const int64_t end = boxes[i]->offsets[sweep] + boxes[i]->sizes[sweep];
    for (size_t j = i + 1; j < boxes.size() && boxes[j]->offsets[sweep] < end; ++j) {
      if (intersect(*boxes[i], *boxes[j])) {
        return c10::str("the chunks at ", shape_text(boxes[i]->offsets), " and ", shape_text(boxes[j]->offsets),
                        " overlap");
      }
      if (--left == 0) return {};
    }
  }
  return {};
}

}  // namespace

std::string cover_fault(const std::vector<int64_t>& sizes, const std::vector<Chunk>& chunks) {
  constexpr size_t kMaxCutDims = 10;
  const int64_t numel = checked_numel(sizes).value_or(0);
  if (sizes.empty()) {
    if (chunks.size() != 1) return c10::str(chunks.size(), " chunks for a tensor without dimensions");
    return {};
  }
  std::vector<const Chunk*> boxes;
  int64_t volume = 0;
  for (const Chunk& chunk : chunks) {
    const int64_t part = checked_numel(chunk.sizes).value_or(0);
    if (part == 0) continue;
    boxes.push_back(&chunk);
    if (__builtin_add_overflow(volume, part, &volume)) return "its chunks overlap";
  }
  if (numel == 0) return boxes.empty() ? std::string() : "its chunks hold elements that it has not";
  std::vector<size_t> cut;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (std::any_of(boxes.begin(), boxes.end(), [&](const Chunk* box) { return box->sizes[d] != sizes[d]; }))
      cut.push_back(d);
  }
  if (cut.size() > kMaxCutDims)
    return c10::str("its chunks are cut along ", cut.size(), " dimensions; at most ", kMaxCutDims, " are read");
  if (volume == numel && tiles(sizes, boxes, cut)) return {};
  const std::string overlap = overlap_in(boxes, cut);
  if (!overlap.empty()) return overlap;
  if (volume == numel) return "its chunks overlap and leave holes";
  return c10::str("its chunks hold ", volume, " of ", numel, " elements");
}

std::string shape_text(const std::vector<int64_t>& sizes) { return c10::str("[", c10::Join(", ", sizes), "]"); }

}  // namespace fsdp2::dcp::detail
