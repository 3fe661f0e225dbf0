// labels: ranks
// pytorch#110762: from_local with uneven shards, where every rank believed another global shape.

#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::DTensor;
using fsdp2::Shard;
using torch::Tensor;

/// Parts of these lengths along `dim` of one tensor with the values 0, 1, 2, ...: as if cut there, and put together.
void expect_put_together(int rank, const std::vector<int64_t>& lengths, int64_t dim) {
  int64_t offset = 0, total = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (static_cast<int>(i) < rank) offset += lengths[i];
    total += lengths[i];
  }
  const std::vector<int64_t> sizes = dim == 0 ? std::vector<int64_t>{total, 2} : std::vector<int64_t>{2, total};
  const Tensor expected = torch::arange(2 * total, torch::kFloat).view(sizes);
  const auto mesh = fsdp2::init_device_mesh(torch::kCPU, {fsdp2::get_world_size()});
  const Tensor mine = expected.narrow(dim, offset, lengths[rank]).contiguous();

  const DTensor joined = fsdp2::from_local(mine, mesh, {Shard{dim}});
  EXPECT_EQ(joined.sizes(), at::IntArrayRef(sizes)) << "rank " << rank;
  EXPECT_EQ(max_difference(joined.full_tensor(), expected), 0) << "rank " << rank;
  EXPECT_EQ(max_difference(joined.to_local(), mine), 0);
  EXPECT_EQ(max_difference(joined.redistribute({fsdp2::Replicate{}}).to_local(), expected), 0);
  EXPECT_EQ(joined.tensor().sum().item<float>(), expected.sum().item<float>());
  const Tensor doubled = joined.tensor() * 2;
  EXPECT_EQ(max_difference(DTensor(doubled).full_tensor(), 2 * expected), 0);
  // Cut as the library cuts, from parts of any lengths.
  const DTensor moved = joined.redistribute({fsdp2::Replicate{}}).redistribute({Shard{dim}});
  EXPECT_EQ(max_difference(moved.full_tensor(), expected), 0);
}

RANKS_TEST(Row25, ThreeRowsAndOne, 2) { expect_put_together(rank, {3, 1}, 0); }
RANKS_TEST(Row25, OneRowAndThree, 2) { expect_put_together(rank, {1, 3}, 0); }
RANKS_TEST(Row25, UnevenColumns, 2) { expect_put_together(rank, {1, 4}, 1); }
RANKS_TEST(Row25, AnEmptyPartBetweenTwo, 3) { expect_put_together(rank, {2, 0, 3}, 0); }
RANKS_TEST(Row25, TheFirstPartEmpty, 3) { expect_put_together(rank, {0, 1, 1}, 0); }

RANKS_TEST(Row25, PartsThatDoNotFitAreRefusedOnEveryRank, 2) {
  const auto mesh = fsdp2::init_device_mesh(torch::kCPU, {2});
  EXPECT_FSDP2_ERROR(fsdp2::from_local(torch::ones({2, rank == 0 ? 2 : 3}), mesh, {Shard{0}}), kInvalidArgument,
                     "rank 1: [2, 3]");
}

}  // namespace
