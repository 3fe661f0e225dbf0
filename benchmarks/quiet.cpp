#include "quiet.h"

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <string>
#include <thread>

namespace bench {
namespace {

double cores() { return static_cast<double>(::sysconf(_SC_NPROCESSORS_ONLN)); }

/// CPU seconds that everything on the machine has used, all cores together, stolen ones included.
double machine_busy_seconds() {
  std::ifstream in("/proc/stat");
  std::string name;
  in >> name;
  double total = 0;
  for (int column = 0; column < 8; ++column) {  // user nice system idle iowait irq softirq steal
    double ticks = 0;
    in >> ticks;
    if (column != 3 && column != 4) total += ticks;
  }
  return total / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

bool of_rank_0(bool value) {
  torch::Tensor flag = torch::tensor(static_cast<int64_t>(value));
  fsdp2::broadcast(flag, 0);
  return flag.item<int64_t>() != 0;
}

double over_ranks(double value, fsdp2::ReduceOp op) {
  torch::Tensor sum = torch::tensor(value, torch::kDouble);
  fsdp2::all_reduce(sum, op);
  return sum.item<double>();
}

}  // namespace

std::vector<Block> quiet_blocks(const std::vector<Block>& blocks, int wanted, double limit) {
  const auto under = [&](double most) {
    std::vector<Block> kept;
    std::copy_if(blocks.begin(), blocks.end(), std::back_inserter(kept),
                 [&](const Block& b) { return b.foreign <= most; });
    return kept;
  };
  std::vector<Block> kept = under(limit);
  int rounds = 0;
  for (const Block& block : kept) rounds += block.end - block.begin;
  if (rounds >= std::max(3, wanted / 4)) return kept;
  std::vector<double> shares;
  for (const Block& block : blocks) shares.push_back(block.foreign);
  return under(median(shares) + 1e-9);
}

void Quiet::wait_until_quiet() {
  if (fsdp2::get_rank() == 0) {
    for (int calm = 0; calm < 2 && options_.wait_seconds > 0;) {
      const double busy = machine_busy_seconds(), start = now();
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      const double elapsed = now() - start;
      options_.wait_seconds -= elapsed;
      calm = (machine_busy_seconds() - busy) / elapsed / cores() < options_.limit ? calm + 1 : 0;
    }
  }
  fsdp2::barrier();
}

std::vector<int> Quiet::run(const std::function<void(int)>& round) {
  const int most = options_.max_factor * wanted_;
  std::vector<Block> blocks;
  int done = 0, good = 0;
  wait_until_quiet();
  while (good < wanted_ && done < most) {
    Block block{.begin = done};
    const double start = now(), busy = machine_busy_seconds(), own = own_cpu_seconds();
    do {
      round(done++);
    } while (!of_rank_0(now() - start >= options_.block_seconds || done >= most));
    const double ours = over_ranks(own_cpu_seconds() - own, fsdp2::ReduceOp::SUM);
    const double foreign = (machine_busy_seconds() - busy - ours) / (now() - start) / cores();
    // Every rank must come to the same decision.
    block.foreign = over_ranks(fsdp2::get_rank() == 0 ? std::max(0.0, foreign) : 0.0, fsdp2::ReduceOp::SUM);
    block.end = done;
    blocks.push_back(block);
    if (block.foreign < options_.limit) {
      good += block.end - block.begin;
    } else if (done < most) {
      wait_until_quiet();
    }
  }
  std::vector<int> kept;
  std::vector<double> shares;
  for (const Block& block : quiet_blocks(blocks, wanted_, options_.limit)) {
    for (int i = block.begin; i < block.end; ++i) kept.push_back(i);
    shares.push_back(block.foreign);
  }
  double mean = 0;
  for (const double share : shares) mean += share / static_cast<double>(shares.size());
  noise_ = {{"kept", kept.size()}, {"rounds", done}, {"foreign_cpu_share", std::round(mean * 1e3) / 1e3}};
  return kept;
}

}  // namespace bench
