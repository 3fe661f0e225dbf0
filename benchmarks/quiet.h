#pragma once

// Measuring on a machine that others use too.

#include <functional>
#include <vector>

#include "measure.h"

namespace bench {

struct QuietOptions {
  double limit = 0.08;         // of the whole machine: CPU time of others in a block that counts
  double block_seconds = 0.5;  // length of a block at least; /proc/stat counts in 10 ms
  int max_factor = 3;          // so many times the wanted rounds are run at most
  double wait_seconds = 90;    // asleep until the machine is quiet, over all blocks together
};

/// Rounds [begin, end), and the share of the machine that others used meanwhile.
struct Block {
  int begin = 0, end = 0;
  double foreign = 0;
};

/// Runs rounds in blocks and keeps the blocks during which the rest of the machine was quiet. After another block it
/// waits for a quiet moment. Needs the process group; collective.
class Quiet {
 public:
  explicit Quiet(int wanted, QuietOptions options = {}) : wanted_(wanted), options_(options) {}

  /// `round` gets its number, from 0. Returns the numbers of the rounds to keep.
  std::vector<int> run(const std::function<void(int)>& round);
  /// How many rounds were kept and run, and the mean share of others in those kept.
  const Json& noise() const { return noise_; }

 private:
  void wait_until_quiet();

  int wanted_;
  QuietOptions options_;
  Json noise_;
};

/// The blocks that count: those under the limit or, where these are fewer rounds than max(3, wanted / 4), the quieter
/// half of all.
std::vector<Block> quiet_blocks(const std::vector<Block>& blocks, int wanted, double limit);

}  // namespace bench
