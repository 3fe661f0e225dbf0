// labels: fast
// Whether chunks tile a tensor: against painting every element, on random tilings and on spoiled ones.

#include "dcp/geometry.h"

#include <gtest/gtest.h>

#include <random>

namespace fsdp2::dcp::detail {
namespace {

using Sizes = std::vector<int64_t>;

bool tiles_when_painted(const Sizes& sizes, const std::vector<Chunk>& chunks) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  std::vector<int> times(static_cast<size_t>(numel), 0);
  for (const Chunk& chunk : chunks) {
    for (int64_t element = 0; element < numel; ++element) {
      bool inside = true;
      int64_t rest = element;
      for (size_t d = sizes.size(); d-- > 0; rest /= sizes[d]) {
        const int64_t at = rest % sizes[d];
        inside &= at >= chunk.offsets[d] && at < chunk.offsets[d] + chunk.sizes[d];
      }
      times[static_cast<size_t>(element)] += inside;
    }
  }
  return std::all_of(times.begin(), times.end(), [](int count) { return count == 1; });
}

/// Cuts boxes in two at random places.
std::vector<Chunk> random_tiling(const Sizes& sizes, int cuts, std::mt19937& random) {
  std::vector<Chunk> chunks{{Sizes(sizes.size(), 0), sizes}};
  for (int i = 0; i < cuts; ++i) {
    const size_t which = random() % chunks.size(), d = random() % sizes.size();
    if (chunks[which].sizes[d] < 2) continue;
    Chunk upper = chunks[which];
    const int64_t at = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(upper.sizes[d] - 1));
    chunks[which].sizes[d] = at;
    upper.offsets[d] += at;
    upper.sizes[d] -= at;
    chunks.push_back(upper);
  }
  return chunks;
}

TEST(Geometry, CoverAgreesWithPainting) {
  std::mt19937 random(5);
  int good = 0, bad = 0;
  for (int round = 0; round < 2000; ++round) {
    Sizes sizes(1 + random() % 3);
    for (int64_t& size : sizes) size = 1 + static_cast<int64_t>(random() % 5);
    std::vector<Chunk> chunks = random_tiling(sizes, static_cast<int>(random() % 8), random);
    const size_t which = random() % chunks.size(), d = random() % sizes.size();
    Chunk& chunk = chunks[which];
    switch (random() % 6) {
      case 0:
        chunks.push_back(chunk);
        break;
      case 1:
        chunks.erase(chunks.begin() + static_cast<std::ptrdiff_t>(which));
        break;
      case 2:  // elsewhere, with the same volume
        if (chunk.offsets[d] > 0) --chunk.offsets[d];
        break;
      case 3:
        if (chunk.offsets[d] + chunk.sizes[d] < sizes[d]) ++chunk.offsets[d];
        break;
      default:
        break;
    }
    std::shuffle(chunks.begin(), chunks.end(), random);
    const bool expected = tiles_when_painted(sizes, chunks);
    (expected ? good : bad) += 1;
    EXPECT_EQ(cover_fault(sizes, chunks).empty(), expected) << round;
  }
  EXPECT_GT(good, 300);
  EXPECT_GT(bad, 300);
}

TEST(Geometry, FaultsAreNamed) {
  EXPECT_EQ(cover_fault({4, 4}, {{{0, 0}, {2, 4}}, {{1, 0}, {2, 4}}}), "the chunks at [0, 0] and [1, 0] overlap");
  EXPECT_EQ(cover_fault({4, 4}, {{{0, 0}, {2, 4}}}), "its chunks hold 8 of 16 elements");
  EXPECT_EQ(cover_fault({}, {}), "0 chunks for a tensor without dimensions");
  EXPECT_EQ(cover_fault({0, 3}, {{{0, 0}, {0, 3}}}), "");
  EXPECT_EQ(cover_fault({2}, {{{0}, {2}}, {{2}, {0}}}), "") << "empty chunks do not count";
}

// A file may list very many chunks that a comparison of all pairs would never get through.
TEST(Geometry, ManyChunksOnADiagonal) {
  constexpr int64_t kChunks = 200000;
  std::vector<Chunk> chunks;
  for (int64_t i = 0; i < kChunks; ++i) chunks.push_back({{i, i}, {kChunks - i, 1}});
  EXPECT_NE(cover_fault({kChunks, kChunks}, chunks), "");
  std::vector<Chunk> squares;
  for (int64_t i = 0; i < 400; ++i) {
    for (int64_t j = 0; j < 400; ++j) squares.push_back({{i * 3, j * 2}, {3, 2}});
  }
  EXPECT_EQ(cover_fault({1200, 800}, squares), "");
}

}  // namespace
}  // namespace fsdp2::dcp::detail
