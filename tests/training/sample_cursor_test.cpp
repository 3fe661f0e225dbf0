// What ranks read next: the same global batches on any number of ranks, every sample once in an epoch, and orders that
// are as random as drawn ones.

#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include <torch/torch.h>

#include <fsdp2/fsdp2.h>

#include "support/ranks.h"

namespace {

using fsdp2::SampleCursor;
using fsdp2::SampleCursorOptions;
using fsdp2::dcp::StateDict;

using Indices = std::vector<int64_t>;

std::vector<SampleCursor> cursors_of(SampleCursorOptions options, int world_size) {
  std::vector<SampleCursor> ranks;
  options.world_size = world_size;
  for (int rank = 0; rank < world_size; ++rank) {
    options.rank = rank;
    ranks.emplace_back(options);
  }
  return ranks;
}

/// The global batch, read by all ranks; their shares differ by at most one.
Indices read(std::vector<SampleCursor>& ranks) {
  Indices batch;
  size_t least = SIZE_MAX, most = 0;
  for (SampleCursor& cursor : ranks) {
    const Indices ahead = cursor.peek(), mine = cursor.next();
    EXPECT_EQ(ahead, mine);
    least = std::min(least, mine.size());
    most = std::max(most, mine.size());
    batch.insert(batch.end(), mine.begin(), mine.end());
  }
  EXPECT_LE(most - least, 1u);
  return batch;
}

TEST(SampleCursor, WithoutShufflingItReadsInOrder) {
  auto ranks = cursors_of({.size = 7, .global_batch = 3, .shuffle = false, .drop_last = false}, 2);
  EXPECT_EQ(ranks[0].steps_per_epoch(), 3);
  EXPECT_EQ(ranks[0].next(), Indices{0});
  EXPECT_EQ(ranks[1].next(), (Indices{1, 2}));
  EXPECT_EQ(read(ranks), (Indices{3, 4, 5}));
  EXPECT_FALSE(ranks[0].at_epoch_start());
  EXPECT_TRUE(ranks[0].peek().empty());
  EXPECT_EQ(read(ranks), Indices{6});
  EXPECT_TRUE(ranks[0].at_epoch_start());
  EXPECT_EQ(ranks[0].epoch(), 0);
  EXPECT_EQ(read(ranks), (Indices{0, 1, 2}));
  EXPECT_EQ(ranks[0].epoch(), 1);

  auto dropping = cursors_of({.size = 7, .global_batch = 3, .shuffle = false}, 1);
  EXPECT_EQ(dropping[0].steps_per_epoch(), 2);
  read(dropping);
  EXPECT_EQ(read(dropping), (Indices{3, 4, 5}));
  EXPECT_EQ(read(dropping), (Indices{0, 1, 2}));
}

TEST(SampleCursor, AnyNumberOfRanksReadsTheSameAndAResumeNeitherRepeatsNorSkips) {
  std::mt19937 random(17);
  const auto between = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int trial = 0; trial < 120; ++trial) {
    SampleCursorOptions options{.size = between(1, 90)};
    options.global_batch = between(1, options.size);
    options.seed = between(-5, 5);
    options.shuffle = between(0, 3) != 0;
    options.drop_last = between(0, 1) != 0;
    auto single = cursors_of(options, 1), ranks = cursors_of(options, 1);
    std::map<int64_t, std::multiset<int64_t>> by_epoch;
    const int64_t steps = 3 * single[0].steps_per_epoch();
    for (int64_t step = 0; step < steps; ++step) {
      if (between(0, 2) == 0) {  // goes on with other ranks
        const StateDict state =
            ranks[static_cast<size_t>(between(0, static_cast<int64_t>(ranks.size()) - 1))].state_dict();
        SampleCursorOptions fresh = options;
        fresh.seed = 99;
        ranks = cursors_of(fresh, static_cast<int>(between(1, 8)));
        for (SampleCursor& cursor : ranks) cursor.load_state_dict(state);
      }
      const Indices batch = read(ranks);
      ASSERT_EQ(batch, read(single)) << "trial " << trial << ", step " << step << ", " << ranks.size() << " ranks";
      by_epoch[single[0].epoch()].insert(batch.begin(), batch.end());
    }
    ASSERT_EQ(by_epoch.size(), 3u);
    for (const auto& [epoch, seen] : by_epoch) {
      const std::set<int64_t> distinct(seen.begin(), seen.end());
      EXPECT_EQ(distinct.size(), seen.size()) << "repeated in epoch " << epoch;
      EXPECT_GE(*distinct.begin(), 0);
      EXPECT_LT(*distinct.rbegin(), options.size);
      const int64_t read = options.drop_last ? options.size - options.size % options.global_batch : options.size;
      EXPECT_EQ(static_cast<int64_t>(seen.size()), read) << "skipped in epoch " << epoch;
    }
  }
}

TEST(SampleCursor, AnotherGlobalBatchGoesOnAtTheSamePosition) {
  auto before = cursors_of({.size = 20, .global_batch = 6}, 2), whole = cursors_of({.size = 20, .global_batch = 20}, 1);
  Indices seen = read(before);
  auto after = cursors_of({.size = 20, .global_batch = 7}, 3);
  for (SampleCursor& cursor : after) cursor.load_state_dict(before[0].state_dict());
  for (int i = 0; i < 2; ++i) {
    const Indices batch = read(after);
    seen.insert(seen.end(), batch.begin(), batch.end());
  }
  EXPECT_EQ(seen, read(whole));
}

/// The order of an epoch.
Indices order(int64_t size, int64_t seed, int64_t epoch) {
  SampleCursor cursor({.size = size, .global_batch = size, .seed = seed, .rank = 0, .world_size = 1});
  cursor.set_position(epoch, 0);
  return cursor.next();
}

/// How far counts are from `expected` each, in standard deviations of the chi-square statistic.
double deviation(const std::vector<int>& counts, double expected, double freedom) {
  double sum = 0;
  for (const int count : counts) sum += (count - expected) * (count - expected) / expected;
  return (sum - freedom) / std::sqrt(2 * freedom);
}

TEST(SampleCursor, EverySampleIsEquallyLikelyAtEveryPositionAndBesideEveryOther) {
  constexpr int kOrders = 4000;
  for (const int64_t size : {2, 3, 4, 5, 6, 8, 13, 16, 31}) {
    const auto n = static_cast<size_t>(size);
    for (const bool by_epoch : {false, true}) {
      std::vector<int> at(n * n, 0), step(n, 0);
      for (int i = 0; i < kOrders; ++i) {
        const Indices samples = by_epoch ? order(size, 7, i) : order(size, i, 0);
        for (size_t p = 0; p < n; ++p) {
          ++at[p * n + static_cast<size_t>(samples[p])];
          if (p > 0) ++step[static_cast<size_t>((samples[p] - samples[p - 1] + size) % size)];
        }
      }
      EXPECT_LT(deviation(at, kOrders / static_cast<double>(size), static_cast<double>((size - 1) * (size - 1))), 6)
          << size << (by_epoch ? " by epoch" : " by seed");
      EXPECT_EQ(step[0], 0);
      if (size < 4) continue;
      step.erase(step.begin());
      const double expected = kOrders;  // size - 1 neighbours, size - 1 differences
      EXPECT_LT(deviation(step, expected, static_cast<double>(size - 2)), 6)
          << size << (by_epoch ? " by epoch" : " by seed");
    }
  }
}

TEST(SampleCursor, GoesAnywhereInAnyDataSetAtOnce) {
  constexpr int64_t kHuge = (int64_t{1} << 62) + 12345;
  SampleCursor cursor({.size = kHuge, .global_batch = 4, .drop_last = false, .rank = 0, .world_size = 1});
  std::set<int64_t> seen;
  for (const int64_t position : {int64_t{0}, kHuge / 2, kHuge - 4}) {
    cursor.set_position(1'000'000'000'000, position);
    for (const int64_t index : cursor.next()) {
      EXPECT_TRUE(index >= 0 && index < kHuge);
      seen.insert(index);
    }
  }
  EXPECT_EQ(seen.size(), 12u);
  EXPECT_TRUE(cursor.at_epoch_start());
  SampleCursor one({.size = 1, .global_batch = 1});
  EXPECT_EQ(one.next(), Indices{0});
}

TEST(SampleCursor, WrongOptionsAndForeignStatesAreNamed) {
  EXPECT_FSDP2_ERROR(SampleCursor({.size = 0, .global_batch = 1}), kInvalidArgument, "size is 0");
  EXPECT_FSDP2_ERROR(SampleCursor({.size = 3, .global_batch = 0}), kInvalidArgument, "global_batch is 0");
  EXPECT_FSDP2_ERROR(SampleCursor({.size = 3, .global_batch = 4}), kInvalidArgument, "drop_last");
  EXPECT_FSDP2_ERROR(SampleCursor({.size = 3, .global_batch = 1, .rank = 2}), kInvalidArgument, "rank 2 of 1");
  SampleCursor far({.size = 3, .global_batch = 1});
  EXPECT_FSDP2_ERROR(far.set_position(INT64_MAX, 0), kInvalidArgument, "epochs lie in");
  SampleCursor cursor({.size = 10, .global_batch = 2, .seed = 4});
  cursor.next();
  const StateDict good = cursor.state_dict();
  const auto refused = [&](const char* key, fsdp2::dcp::Value value, const char* text) {
    StateDict state = good;
    state["epoch"] = 3;
    state["seed"] = 5;
    state[key] = std::move(value);
    EXPECT_FSDP2_ERROR(cursor.load_state_dict(state), kInvalidArgument, text);
    EXPECT_EQ(cursor.epoch(), 0);
    EXPECT_EQ(cursor.state_dict()["seed"].integer(), 4);
  };
  refused("size", 11, "11 samples");
  refused("shuffle", false, "shuffle");
  refused("position", 11, "position 11");
  refused("epoch", -1, "epoch -1");
  refused("epoch", "x", "String");
  StateDict lacking = good;
  lacking.erase("size");
  EXPECT_FSDP2_ERROR(cursor.load_state_dict(lacking), kNotFound, "size");
}

}  // namespace
