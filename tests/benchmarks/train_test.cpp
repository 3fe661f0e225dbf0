// labels: peer
// libraries: fsdp2_bench
// bench_train computes what benchmarks/peer_train.py computes in each mode, and the filter keeps the right rounds.

#include "trainer.h"

#include <fsdp2/fsdp2.h>

#include <chrono>
#include <map>
#include <sstream>
#include <thread>

#include "hash_rule.h"
#include "quiet.h"
#include "range_profile.h"
#include "support/ranks.h"

namespace {

using bench::Json;

// The values of the rule, as another program of it printed them.
TEST(BenchTrain, WeightsAndTokensFollowTheRule) {
  EXPECT_EQ(llama::splitmix64(0), 0xe220a8397b1dcdafu);
  EXPECT_EQ(llama::splitmix64(1), 0x910a2dec89025cc1u);
  EXPECT_EQ(llama::fnv1a("tokens"), 0x93fab8f021712b13u);
  EXPECT_EQ(llama::fnv1a("layers.0.attention.wq.weight"), 0x2c403a3125427ab5u);
  ASSERT_TRUE(fsdp2::testing::run_ranks(
      1,
      [](int) {
        const bench::TrainOptions tiny{
            .model = {.dim = 64, .layers = 8, .heads = 4, .kv_heads = 2, .ffn = 192, .vocab = 512}};
        std::map<std::string, int64_t> sums;
        int64_t total = 0, count = 0;
        const auto model = bench::build_model(tiny);
        for (const auto& item : model->named_parameters()) {
          const at::Tensor bits = item.value().detach().view(torch::kInt32).to(torch::kInt64);
          total += sums[item.key()] = bits.sum().item<int64_t>();
          ++count;
        }
        EXPECT_EQ(count, 75);
        EXPECT_EQ(sums["tok_embeddings.weight"], -1468439379892);
        EXPECT_EQ(sums["layers.0.attention.wq.weight"], -96688080600);
        EXPECT_EQ(sums["layers.0.attention_norm.weight"], 68164001792);
        EXPECT_EQ(sums["output.weight"], -1315000382926);
        EXPECT_EQ(total, -19881575644394);
        const auto [first, targets] = llama::hash_tokens(0, 0, 1, 0, 2, 1, 32, 512);
        EXPECT_TRUE(first[0].slice(0, 0, 3).equal(torch::tensor({365, 366, 367}, torch::kInt64)));
        EXPECT_TRUE(targets[0].slice(0, 0, 2).equal(torch::tensor({366, 367}, torch::kInt64)));
        const auto later = llama::hash_tokens(3, 0, 1, 1, 2, 1, 32, 512).first;
        EXPECT_TRUE(later[0].slice(0, 0, 3).equal(torch::tensor({388, 391, 394}, torch::kInt64)));
      },
      {.init_process_group = false}));
}

TEST(BenchTrain, KeepsTheBlocksInWhichOthersWereQuiet) {
  const auto begins = [](const std::vector<bench::Block>& blocks) {
    std::vector<int> result;
    for (const auto& block : blocks) result.push_back(block.begin);
    return result;
  };
  EXPECT_EQ(begins(bench::quiet_blocks({{0, 3, 0.01}, {3, 6, 0.5}, {6, 9, 0.08}}, 6, 0.08)), (std::vector{0, 6}));
  // 2 quiet rounds are fewer than max(3, 20 / 4): the half that is quieter.
  EXPECT_EQ(begins(bench::quiet_blocks({{0, 2, 0.01}, {2, 4, 0.3}, {4, 6, 0.6}, {6, 8, 0.2}}, 20, 0.08)),
            (std::vector{0, 6}));
}

TEST(BenchTrain, QuantilesAndRounding) {
  EXPECT_DOUBLE_EQ(bench::median({4, 1, 2}), 2);
  EXPECT_DOUBLE_EQ(bench::median({4, 1, 2, 3}), 2.5);
  EXPECT_DOUBLE_EQ(bench::quantile({10, 20}, 0.9), 19);
  EXPECT_EQ(bench::rounded({{"a", {1.23456, 7}}, {"b", 123456.0}}).dump(), R"({"a":[1.235,7],"b":123500.0})");
}

TEST(BenchTrain, RangesCountWithoutThoseInside) {
  bench::RangeProfile profile;
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
  const auto work = [&] {
    RECORD_USER_SCOPE("FSDP::outer");
    pause();
    for (int i = 0; i < 2; ++i) {
      RECORD_USER_SCOPE("FSDP::inner");
      {
        RECORD_USER_SCOPE("another's");
        pause();
      }
    }
  };
  work();
  auto ranges = profile.ranges();
  ASSERT_EQ(ranges.size(), 2u);
  EXPECT_EQ(ranges["FSDP::outer"].calls, 1);
  EXPECT_EQ(ranges["FSDP::inner"].calls, 2);
  EXPECT_GE(ranges["FSDP::outer"].seconds, 0.02);
  EXPECT_GE(ranges["FSDP::inner"].seconds, 0.04);
  EXPECT_GT(ranges["FSDP::inner"].seconds, ranges["FSDP::outer"].seconds);  // 60 ms would be those inside as well
  profile.clear();
  EXPECT_TRUE(profile.ranges().empty());
}

struct Case {
  bench::TrainOptions options;
  std::string modes;
  std::vector<std::string> flags;
  double tolerance;
};

void compare_with_python(const Case& c) {
  constexpr int kRanks = 2, kSteps = 4;
  std::vector<std::string> arguments{"--dim",      "32",
                                     "--layers",   "2",
                                     "--heads",    "4",
                                     "--kv-heads", "2",
                                     "--ffn",      "51",
                                     "--vocab",    "101",
                                     "--seq",      "16",
                                     "--batch",    "2",
                                     "--clip",     "1",
                                     "--warmup",   "0",
                                     "--steps",    std::to_string(kSteps),
                                     "--max-wait", "0",
                                     "--mode",     c.modes};
  arguments.insert(arguments.end(), c.flags.begin(), c.flags.end());
  const std::string script = fsdp2::testing::test_file("../benchmarks/peer_train.py");
  const auto python = fsdp2::testing::run_python_ranks(kRanks, script, arguments);
  ASSERT_EQ(python.exit_code, 0) << python.output;
  std::map<std::string, Json> expected;  // losses by mode
  std::istringstream lines(python.output);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("{")) continue;
    const Json record = Json::parse(line);
    expected[record["mode"].get<std::string>()] = record["loss"];
  }
  ASSERT_EQ(expected.size(), static_cast<size_t>(1 + std::count(c.modes.begin(), c.modes.end(), ',')));
  ASSERT_TRUE(fsdp2::testing::run_ranks(kRanks, [&](int) {
    bench::TrainOptions options = c.options;
    options.model = {.dim = 32, .layers = 2, .heads = 4, .kv_heads = 2, .ffn = 51, .vocab = 101};
    options.seq = 16;
    options.batch = 2;
    options.clip = 1;
    for (const auto& [mode, losses] : expected) {
      bench::Trainer trainer(mode, options);
      for (int i = 0; i < kSteps; ++i) {
        trainer.step(i);
        const auto everyone = bench::gather(trainer.losses().back());
        const double ours = (everyone[0].get<double>() + everyone[1].get<double>()) / kRanks;
        EXPECT_NEAR(ours, losses[i].get<double>(), c.tolerance * losses[i].get<double>()) << mode << ", step " << i;
      }
    }
  }));
}

TEST(BenchTrain, LossesOfEveryMode) {
  compare_with_python({{.grad_accum = 2}, "fsdp2,nocomm,stub,local", {"--grad-accum", "2"}, 2e-6});
}

TEST(BenchTrain, LossesInMixedPrecision) { compare_with_python({{.mp = true}, "fsdp2,nocomm,local", {"--mp"}, 2e-3}); }

RANKS_TEST(BenchTrain, UnknownModesAreRefused, 1) {
  EXPECT_FSDP2_ERROR(bench::Trainer("ddp", {}), kUnsupported, "not there yet");
  EXPECT_FSDP2_ERROR(bench::Trainer("fsdp3", {}), kInvalidArgument, "fsdp3 is unknown");
}

}  // namespace
