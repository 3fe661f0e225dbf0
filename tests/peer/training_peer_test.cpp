// labels: peer
// timeout: 600
// libraries: fsdp2_llama
// Losses, gradient norms, and number and bytes of collectives equal those of Python's FSDP2, which runs in this test.

#include <fsdp2/clip_grad.h>

#include <fstream>

#include <nlohmann/json.hpp>

#include "hash_rule.h"
#include "model.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using nlohmann::json;
using torch::Tensor;

json base_case() {
  return {{"config", {{"dim", 64}, {"layers", 4}, {"heads", 4}, {"kv_heads", 2}, {"ffn", 190}, {"vocab", 251}}},
          {"steps", 20}, {"accum", 1}, {"batch", 1}, {"seq", 32}, {"mixed_precision", false},
          {"reshard_after_forward", nullptr}};
}

json make_cases() {
  json cases;
  cases["fp32"] = base_case();
  cases["mixed"] = base_case();
  cases["mixed"]["mixed_precision"] = true;
  cases["accumulate"] = base_case();
  cases["accumulate"].update({{"accum", 3}, {"steps", 4}});
  cases["mixed_accumulate"] = cases["accumulate"];
  cases["mixed_accumulate"]["mixed_precision"] = true;
  cases["always_reshard"] = base_case();
  cases["always_reshard"].update({{"reshard_after_forward", true}, {"steps", 3}});
  cases["never_reshard"] = base_case();
  cases["never_reshard"].update({{"reshard_after_forward", false}, {"steps", 3}});
  return cases;
}

llama::Config config_of(const json& c) {
  llama::Config config;
  config.dim = c["dim"];
  config.layers = c["layers"];
  config.heads = c["heads"];
  config.kv_heads = c["kv_heads"];
  config.ffn = c["ffn"];
  config.vocab = c["vocab"];
  return config;
}

struct Step {
  double loss;
  fsdp2::Counters counters;
};

/// The loop of training_peer.py, sharded or (world 1 with the batch of all ranks) whole.
class Run {
 public:
  explicit Run(const json& spec) : spec_(spec), config_(config_of(spec["config"])) {
    model_ = llama::Llama(config_);
    llama::hash_weights(model_);
  }
  void shard() {
    fsdp2::FullyShardOptions options;
    if (spec_["mixed_precision"]) {
      options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    }
    if (!spec_["reshard_after_forward"].is_null()) {
      options.reshard_after_forward = spec_["reshard_after_forward"].get<bool>();
    }
    handle_ = llama::shard(model_, options);
  }
  /// Ranks [first, last) of `world` take part in this process.
  std::vector<Step> train(int first, int last, int world) {
    auto options = torch::optim::AdamWOptions(1e-3).betas({0.9, 0.95}).eps(1e-8).weight_decay(0.1);
    torch::optim::AdamW optimizer(model_->parameters(), options);
    const int64_t accum = spec_["accum"];
    std::vector<Step> steps;
    for (int64_t step = 0; step < spec_["steps"]; ++step) {
      fsdp2::reset_counters();
      double total = 0;
      for (int64_t micro = 0; micro < accum; ++micro) {
        if (handle_) handle_->set_requires_gradient_sync(micro == accum - 1);
        for (int rank = first; rank < last; ++rank) {
          const auto [tokens, targets] =
              llama::hash_tokens(step, micro, accum, rank, world, spec_["batch"], spec_["seq"], config_.vocab);
          const Tensor logits = model_(tokens).to(torch::kFloat).view({-1, config_.vocab});
          Tensor loss = torch::nn::functional::cross_entropy(logits, targets.view({-1})) / accum;
          (loss / (last - first)).backward();
          total += loss.item<double>();
        }
      }
      const fsdp2::Counters counters = fsdp2::counters();
      last_norm = fsdp2::clip_grad_norm_(model_->parameters(), 1.0).item<double>();
      optimizer.step();
      optimizer.zero_grad();
      Tensor sum = torch::tensor(total, torch::kDouble);
      if (handle_) fsdp2::all_reduce(sum);
      steps.push_back({sum.item<double>() / world, counters});
    }
    return steps;
  }
  double last_norm = 0;

 private:
  json spec_;
  llama::Config config_;
  llama::Llama model_{nullptr};
  std::optional<fsdp2::FSDPModule> handle_;
};

void expect_close(double ours, double expected, double relative, const std::string& what) {
  EXPECT_LE(std::abs(ours - expected), relative * std::abs(expected)) << what << ": " << ours << " for " << expected;
}

void compare_with_python(int num_ranks) {
  const fsdp2::testing::TempDir folder;
  const std::string cases_file = folder.path() + "/cases.json", results_file = folder.path() + "/results.json";
  const json cases = make_cases();
  std::ofstream(cases_file) << cases;
  const auto python = fsdp2::testing::run_python_ranks(num_ranks, fsdp2::testing::test_file("peer/training_peer.py"),
                                                       {cases_file, results_file}, std::chrono::seconds(300));
  ASSERT_EQ(python.exit_code, 0) << python.output;
  const json expected = json::parse(std::ifstream(results_file));
  ASSERT_TRUE(fsdp2::testing::run_ranks(
      num_ranks,
      [&](int rank) {
        for (const auto& [name, spec] : cases.items()) {
          const json& peer = expected[name];
          const double tolerance = spec["mixed_precision"] ? 2e-2 : 1e-5;
          Run run(spec);
          run.shard();
          const std::vector<Step> steps = run.train(rank, rank + 1, num_ranks);
          ASSERT_EQ(steps.size(), peer["losses"].size());
          for (size_t i = 0; i < steps.size(); ++i) {
            const std::string at = name + " step " + std::to_string(i);
            expect_close(steps[i].loss, peer["losses"][i], tolerance, at);
            EXPECT_EQ(steps[i].counters.all_gathers, peer["steps"][i]["all_gathers"].get<int64_t>()) << at;
            EXPECT_EQ(steps[i].counters.reduce_scatters, peer["steps"][i]["reduce_scatters"].get<int64_t>()) << at;
            EXPECT_EQ(steps[i].counters.bytes, peer["steps"][i]["bytes"].get<int64_t>()) << at;
          }
          expect_close(run.last_norm, peer["last_norm"], 10 * tolerance, name + " gradient norm");
        }
        // The whole model in one process, on the same tokens.
        Run whole(cases["fp32"]);
        const std::vector<Step> steps = whole.train(0, num_ranks, num_ranks);
        for (size_t i = 0; i < steps.size(); ++i) {
          expect_close(steps[i].loss, expected["fp32"]["losses"][i], 1e-5, "whole, step " + std::to_string(i));
        }
      },
      {.timeout = std::chrono::seconds(240)}));
}

TEST(TrainingPeer, TwoRanks) { compare_with_python(2); }
TEST(TrainingPeer, FourRanks) { compare_with_python(4); }

}  // namespace
