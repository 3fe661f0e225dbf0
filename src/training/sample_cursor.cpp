#include <fsdp2/sample_cursor.h>

#include <fsdp2/error.h>
#include <fsdp2/process_group.h>

#include <algorithm>
#include <array>
#include <bit>

namespace fsdp2 {
namespace {

constexpr int64_t kMaxEpoch = int64_t{1} << 62;  // the next ones can be counted

/// The finalizer of SplitMix64: every bit of the result depends on every bit of the input.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Note [Shuffling by a formula]
// A position is cut into a high and a low half of its bits, and each half is changed in turn by a hash of the other (a
// Feistel network). A round can be undone, whatever the hash, so the whole is a bijection of [0, 2^bits), with a key
// for each (seed, epoch). To stay within [0, size) it is applied again while the result lies outside: the walk along
// the cycle of a point inside ends inside, and is a bijection too. `bits` is the least that holds `size`, so fewer than
// two walks are expected; data sets so small that halves of their bits cannot mix have more bits than they need, and
// walk longer. No memory, no start-up, and position p of an epoch is known without those before it.
constexpr int kLeastBits = 10;

class Shuffle {
 public:
  Shuffle(int64_t size, int64_t seed, int64_t epoch) : size_(static_cast<uint64_t>(size)) {
    const int bits = std::max<int>(kLeastBits, std::bit_width(size_ - 1));
    low_bits_ = bits - bits / 2;
    low_mask_ = mask(low_bits_);
    high_mask_ = mask(bits / 2);
    const uint64_t key = mix(mix(static_cast<uint64_t>(seed)) ^ static_cast<uint64_t>(epoch));
    for (size_t i = 0; i < keys_.size(); ++i) keys_[i] = mix(key + i);
  }

  int64_t operator()(int64_t position) const {
    auto x = static_cast<uint64_t>(position);
    do {
      uint64_t high = x >> low_bits_, low = x & low_mask_;
      for (size_t i = 0; i < keys_.size(); i += 2) {
        low ^= mix(high ^ keys_[i]) & low_mask_;
        high ^= mix(low ^ keys_[i + 1]) & high_mask_;
      }
      x = high << low_bits_ | low;
    } while (x >= size_);
    return static_cast<int64_t>(x);
  }

 private:
  static uint64_t mask(int bits) { return (uint64_t{1} << bits) - 1; }

  uint64_t size_, low_mask_, high_mask_;
  int low_bits_;
  std::array<uint64_t, 8> keys_;  // of the rounds: 4 on either half
};

}  // namespace

SampleCursor::SampleCursor(const SampleCursorOptions& options) : options_(options) {
  const auto check_positive = [](int64_t value, const char* name) {
    FSDP2_CHECK(value >= 1, kInvalidArgument, "[sample_cursor] ", name, " is ", value, "; it must be 1 or more");
  };
  check_positive(options.size, "size");
  check_positive(options.global_batch, "global_batch");
  FSDP2_CHECK(!options.drop_last || options.global_batch <= options.size, kInvalidArgument,
              "[sample_cursor] a data set of ", options.size, " samples does not fill a global batch of ",
              options.global_batch, "; make the batch smaller or set drop_last = false");
  const bool joined = is_initialized();
  world_size_ = options.world_size.value_or(joined ? get_world_size() : 1);
  rank_ = options.rank.value_or(joined ? get_rank() : 0);
  FSDP2_CHECK(world_size_ >= 1 && rank_ >= 0 && rank_ < world_size_, kInvalidArgument, "[sample_cursor] rank ", rank_,
              " of ", world_size_, " does not exist; pass both rank and world_size");
}

int64_t SampleCursor::steps_per_epoch() const {
  const int64_t full = options_.size / options_.global_batch;
  return options_.drop_last || options_.size % options_.global_batch == 0 ? full : full + 1;
}

SampleCursor::Range SampleCursor::next_range() const {
  const int64_t left = options_.size - position_;
  if (left < (options_.drop_last ? options_.global_batch : 1))
    return {epoch_ + 1, 0, std::min(options_.global_batch, options_.size)};
  return {epoch_, position_, position_ + std::min(options_.global_batch, left)};
}

bool SampleCursor::at_epoch_start() const { return next_range().begin == 0; }

std::vector<int64_t> SampleCursor::samples(const Range& range) const {
  const int64_t count = range.end - range.begin;
  // Part r of n of `count` samples, without count * r, which may overflow.
  const auto start = [&](int64_t part) {
    return range.begin + count / world_size_ * part + count % world_size_ * part / world_size_;
  };
  std::vector<int64_t> mine;
  const Shuffle shuffled(options_.size, options_.seed, range.epoch);
  for (int64_t position = start(rank_); position < start(rank_ + 1); ++position)
    mine.push_back(options_.shuffle ? shuffled(position) : position);
  return mine;
}

std::vector<int64_t> SampleCursor::peek() const { return samples(next_range()); }

std::vector<int64_t> SampleCursor::next() {
  const Range range = next_range();
  std::vector<int64_t> mine = samples(range);
  epoch_ = range.epoch;
  position_ = range.end;
  return mine;
}

void SampleCursor::set_position(int64_t epoch, int64_t position) {
  FSDP2_CHECK(epoch >= 0 && epoch < kMaxEpoch && position >= 0 && position <= options_.size, kInvalidArgument,
              "[sample_cursor] epoch ", epoch, ", position ", position, " is not in the data set; epochs lie in [0, ",
              kMaxEpoch, "), positions in [0, ", options_.size, "]");
  epoch_ = epoch;
  position_ = position;
}

dcp::StateDict SampleCursor::state_dict() {
  return {{"epoch", epoch_},
          {"position", position_},
          {"seed", options_.seed},
          {"size", options_.size},
          {"shuffle", options_.shuffle}};
}

void SampleCursor::load_state_dict(const dcp::StateDict& state) {
  const int64_t size = state.at("size").integer(), seed = state.at("seed").integer();
  const bool shuffle = state.at("shuffle").boolean();
  FSDP2_CHECK(size == options_.size, kInvalidArgument, "[sample_cursor] the state is of a data set of ", size,
              " samples, this one has ", options_.size,
              "; its position means nothing here: leave the cursor out of what is loaded, or use set_position()");
  FSDP2_CHECK(shuffle == options_.shuffle, kInvalidArgument,
              "[sample_cursor] the state is of a cursor with shuffle = ", shuffle, ", this one has ", options_.shuffle,
              "; make it with the same");
  set_position(state.at("epoch").integer(), state.at("position").integer());
  options_.seed = seed;
}

}  // namespace fsdp2
