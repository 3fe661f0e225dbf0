// labels: ranks, peer
// Loss scaling: skipped on all ranks together, scales as Python's GradScaler, which runs in this test.

#include <fstream>
#include <random>

#include <nlohmann/json.hpp>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using nlohmann::json;
using torch::Tensor;
using torch::optim::SGD;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// ---- Against Python

json make_cases() {
  std::mt19937 random(5);
  json cases = json::array();
  const auto add = [&](json options, const std::string& letters, int optimizers, int length) {
    json iterations = json::array();
    for (int i = 0; i < length; ++i) {
      std::string now;
      for (int k = 0; k < optimizers; ++k) now += letters[random() % letters.size()];
      iterations.push_back(now);
    }
    cases.push_back({{"options", options}, {"iterations", iterations}});
  };
  add(json::object(), "ffin", 1, 20);
  add({{"init_scale", 3.0}, {"growth_interval", 1}, {"growth_factor", 1.7}, {"backoff_factor", 0.3}}, "fffi", 1, 60);
  add({{"init_scale", 1e38}, {"growth_interval", 2}, {"growth_factor", 3.0}}, "f", 1, 9);  // not grown beyond float32
  add({{"init_scale", 1024.0}, {"growth_interval", 3}, {"growth_factor", 4.0}, {"backoff_factor", 0.25}}, "ffffffin", 2,
      60);
  add({{"init_scale", 8.0}, {"growth_interval", 2}}, "fffffuin", 3, 40);
  return cases;
}

/// The loop of grad_scaler_peer.py from `first` on.
void expect_as_python(const json& spec, const json& expected, fsdp2::GradScaler& scaler, size_t first) {
  std::vector<Tensor> params;
  std::vector<std::unique_ptr<SGD>> optimizers;
  for (size_t k = 0; k < spec["iterations"][0].get<std::string>().size(); ++k) {
    params.push_back(torch::zeros({3}, torch::requires_grad()));
    optimizers.push_back(std::make_unique<SGD>(std::vector<Tensor>{params.back()}, 1.0));
  }
  for (size_t i = first; i < spec["iterations"].size(); ++i) {
    const std::string letters = spec["iterations"][i];
    std::string stepped;
    for (size_t k = 0; k < letters.size(); ++k) {
      const double middle = letters[k] == 'i' ? kInfinity : letters[k] == 'n' ? kNan : 1.0;
      optimizers[k]->zero_grad();
      scaler.scale((params[k] * torch::tensor({1.0, middle, 2.0}, torch::kFloat)).sum()).backward();
      if (letters[k] == 'u') {
        scaler.unscale_(*optimizers[k]);
        stepped += 'n';
      } else {
        const Tensor before = params[k].detach().clone();
        const bool said = scaler.step(*optimizers[k]);
        EXPECT_EQ(said, !torch::equal(before, params[k].detach()));
        stepped += said ? 'y' : 'n';
      }
    }
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), expected["scales"][i].get<double>()) << spec["options"] << " iteration " << i;
    EXPECT_EQ(stepped, expected["stepped"][i].get<std::string>()) << spec["options"] << " iteration " << i;
  }
}

TEST(GradScaler, ScalesAndSkipsEqualPythonsInOneProcessWithoutAGroup) {
  const TempDir folder;
  const json cases = make_cases();
  const std::string in = folder.path() + "/cases.json", out = folder.path() + "/results.json";
  const std::string checkpoint = folder.path() + "/checkpoint";
  std::ofstream(in) << cases;
  const auto python = run_python(test_file("training/grad_scaler_peer.py"), {in, out, checkpoint});
  ASSERT_EQ(python.exit_code, 0) << python.output;
  const json expected = json::parse(std::ifstream(out));
  ASSERT_TRUE(run_ranks(
      1,
      [&](int) {
        ASSERT_FALSE(fsdp2::is_initialized());
        for (size_t i = 0; i < cases.size(); ++i) {
          fsdp2::GradScalerOptions options;
          const json& given = cases[i]["options"];
          options.init_scale = given.value("init_scale", options.init_scale);
          options.growth_factor = given.value("growth_factor", options.growth_factor);
          options.backoff_factor = given.value("backoff_factor", options.backoff_factor);
          options.growth_interval = given.value("growth_interval", options.growth_interval);
          fsdp2::GradScaler scaler(options);
          expect_as_python(cases[i], expected[i], scaler, 0);
        }
        // Python's scaler in the middle of the last case, loaded from its checkpoint.
        auto scaler = std::make_shared<fsdp2::GradScaler>();
        fsdp2::dcp::StateDict state{{"scaler", scaler}};
        fsdp2::dcp::load(state, checkpoint);
        expect_as_python(cases.back(), expected.back(), *scaler, cases.back()["iterations"].size() / 2);
      },
      {.init_process_group = false}));
}

// ---- Ranks

Tensor batch_of(int rank, const Tensor& all) { return all.narrow(0, 2 * rank, 2); }

RANKS_TEST(GradScaler, AnInfinityOnOneRankSkipsTheStepOnAll, 2) {
  for (const double bad : {kInfinity, -kInfinity, kNan}) {
    torch::manual_seed(1);
    Net model(2), reference(2);
    copy_state(*model, *reference);
    shard(model);
    SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    SGD expected_optimizer(reference->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    fsdp2::GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
    double expected_scale = 1024;
    for (int step = 0, finite = 0; step < 6; ++step) {
      const bool skips = step == 1 || step == 4;
      const Tensor tokens = torch::randint(NetImpl::kVocab, {4, 3});
      optimizer.zero_grad();
      scaler.scale(loss_of(model, batch_of(rank, tokens))).backward();
      if (skips && rank == step % 2) {
        torch::NoGradGuard no_grad;
        fsdp2::DTensor(model->blocks[1]->up->weight.grad()).to_local().view({-1})[0].fill_(bad);
      }
      if (step % 2 == 0) scaler.unscale_(optimizer);
      EXPECT_EQ(scaler.step(optimizer), !skips);
      scaler.update();
      if (skips) {
        finite = 0;
        expected_scale /= 2;
      } else {
        expected_optimizer.zero_grad();
        loss_of(reference, tokens).backward();
        expected_optimizer.step();
        if (++finite == 2) {
          finite = 0;
          expected_scale *= 2;
        }
      }
      EXPECT_EQ(scaler.get_scale(), expected_scale);
      for (const auto& named : reference->named_parameters()) {
        EXPECT_LE(max_difference(whole(model->named_parameters()[named.key()]), named.value().detach()), 1e-5)
            << named.key() << " step " << step;
      }
    }
  }
}

RANKS_TEST(GradScaler, LargeScalesOverflowInHalfPrecisionUntilTheyFit, 2) {
  // The gradient is the input, 3 and 5, times the scale: 5 * 16384 is above 65504, 5 * 8192 is not.
  Linear layer = linear(1, 1);
  { torch::NoGradGuard no_grad; layer->weight.fill_(1); }
  fsdp2::fully_shard(layer, {.mp_policy = {.param_dtype = torch::kHalf, .reduce_dtype = torch::kFloat}});
  SGD optimizer(layer->parameters(), 0.25);
  fsdp2::GradScaler scaler;
  std::vector<bool> stepped;
  for (int i = 0; i < 4; ++i) {
    optimizer.zero_grad();
    scaler.scale(layer(torch::full({1, 1}, 3.0 + 2 * rank)).to(torch::kFloat).sum()).backward();
    stepped.push_back(scaler.step(optimizer));
    scaler.update();
  }
  EXPECT_EQ(stepped, (std::vector<bool>{false, false, false, true}));
  EXPECT_EQ(scaler.get_scale(), 8192);
  EXPECT_EQ(whole(layer->weight).item<float>(), 1 - 0.25 * 4);
}

RANKS_TEST(GradScaler, EmptyShardsTakePart, 3) {
  Linear layer = linear(4, 1);  // one row: ranks 1 and 2 hold nothing
  { torch::NoGradGuard no_grad; layer->weight.fill_(1); }
  fsdp2::fully_shard(layer);
  SGD optimizer(layer->parameters(), 0.5);
  fsdp2::GradScaler scaler({.init_scale = 64});
  for (const bool bad : {false, true, false}) {
    optimizer.zero_grad();
    scaler.scale(layer(torch::full({1, 4}, bad && rank == 2 ? kInfinity : 1.0)).sum()).backward();
    EXPECT_EQ(scaler.step(optimizer), !bad);
    scaler.update();
  }
  EXPECT_EQ(scaler.get_scale(), 32);
  EXPECT_EQ(max_difference(whole(layer->weight), torch::full({1, 4}, 1 - 2 * 0.5)), 0);
}

RANKS_TEST(GradScaler, UnscaledGradientsCanBeClippedLikeThoseOfAWholeModel, 2) {
  torch::manual_seed(2);
  Net model(1), reference(1);
  copy_state(*model, *reference);
  shard(model);
  SGD optimizer(model->parameters(), 0.1);
  fsdp2::GradScaler scaler;
  const Tensor tokens = torch::randint(NetImpl::kVocab, {4, 3});
  scaler.scale(loss_of(model, batch_of(rank, tokens))).backward();
  loss_of(reference, tokens).backward();
  scaler.unscale_(optimizer);
  for (const auto& named : reference->named_parameters()) {
    const Tensor grad = model->named_parameters()[named.key()].grad();
    EXPECT_LE(max_difference(whole(grad), named.value().grad()), 1e-6) << named.key();
  }
  const double norm = fsdp2::clip_grad_norm_(model->parameters(), 0.1).item<double>();
  EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.1), 1e-5);
  EXPECT_TRUE(scaler.step(optimizer));
}

RANKS_TEST(GradScaler, SeveralOptimizersShareOneScale, 2) {
  Linear first = linear(2, 4), second = linear(2, 4);
  for (Linear* layer : {&first, &second}) {
    { torch::NoGradGuard no_grad; (*layer)->weight.zero_(); }
    fsdp2::fully_shard(*layer);
  }
  SGD of_first(first->parameters(), 1.0), of_second(second->parameters(), 1.0);
  fsdp2::GradScaler scaler({.init_scale = 16});
  const auto backward = [&](double a, double b) {
    of_first.zero_grad();
    of_second.zero_grad();
    scaler.scale(first(torch::full({1, 2}, a)).sum() + second(torch::full({1, 2}, b)).sum()).backward();
  };
  backward(1, rank == 1 ? kInfinity : 1);
  EXPECT_TRUE(scaler.step(of_first));
  EXPECT_FALSE(scaler.step(of_second));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 8);
  EXPECT_EQ(max_difference(whole(first->weight), torch::full({4, 2}, -1.0)), 0);
  EXPECT_EQ(max_difference(whole(second->weight), torch::zeros({4, 2})), 0);

  // Only unscaled, with an infinity in the shard of one rank: update() asks the others.
  backward(1, 1);
  if (rank == 0) fsdp2::DTensor(second->weight.grad()).to_local().view({-1})[0].fill_(kInfinity);
  EXPECT_TRUE(scaler.step(of_first));
  scaler.unscale_(of_second);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 4);
}

RANKS_TEST(GradScaler, RanksOutsideTheGroupDecideForThemselves, 2) {
  const auto alone = fsdp2::new_group({0}), other = fsdp2::new_group({1});
  Tensor param = torch::zeros({2}, torch::requires_grad());
  SGD optimizer({param}, 1.0);
  fsdp2::GradScaler scaler({.init_scale = 4, .group = rank == 0 ? alone : other});
  scaler.scale((param * (rank == 0 ? kInfinity : 1.0)).sum()).backward();
  EXPECT_EQ(scaler.step(optimizer), rank == 1);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), rank == 0 ? 2 : 4);
}

// ---- Errors

TEST(GradScaler, SillyOptionsAreRefused) {
  const fsdp2::GradScalerOptions silly[] = {
      {.init_scale = 0},     {.init_scale = -1},      {.init_scale = kNan},     {.init_scale = kInfinity},
      {.init_scale = 1e300}, {.growth_factor = 1},    {.growth_factor = kNan},  {.backoff_factor = 0},
      {.backoff_factor = 1}, {.backoff_factor = kNan}, {.growth_interval = 0}};
  for (const auto& options : silly)
    EXPECT_FSDP2_ERROR(fsdp2::GradScaler scaler(options), kInvalidArgument, "grad_scaler");
}

RANKS_TEST(GradScaler, CallsOutOfOrderAreRefusedAndChangeNothing, 2) {
  Linear layer = linear(2, 3);
  auto handle = fsdp2::fully_shard(layer);
  SGD optimizer(layer->parameters(), 1.0);
  fsdp2::GradScaler scaler({.init_scale = 16});
  const auto backward = [&] { scaler.scale(layer(torch::ones({1, 2})).sum()).backward(); };
  const auto gradient = [&] { return whole(layer->weight.grad())[0][0].item<double>(); };
  layer(torch::ones({1, 2})).sum().backward();
  EXPECT_FSDP2_ERROR(scaler.step(optimizer), kUsage, "scale()");
  EXPECT_FSDP2_ERROR(scaler.update(), kUsage, "update()");
  EXPECT_EQ(gradient(), 1);
  optimizer.zero_grad();

  scaler.scale(torch::ones({}));
  EXPECT_FSDP2_ERROR(scaler.step(optimizer), kUsage, "has a gradient");
  scaler.update();

  backward();
  scaler.unscale_(optimizer);
  EXPECT_FSDP2_ERROR(scaler.unscale_(optimizer), kUsage, "twice");
  EXPECT_EQ(gradient(), 1);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_FSDP2_ERROR(scaler.unscale_(optimizer), kUsage, "after step()");
  EXPECT_FSDP2_ERROR(scaler.step(optimizer), kUsage, "twice");
  EXPECT_EQ(gradient(), 1);
  scaler.update();
  optimizer.zero_grad();

  handle.set_requires_gradient_sync(false);
  backward();
  EXPECT_FSDP2_ERROR(scaler.unscale_(optimizer), kUsage, "weight");
  EXPECT_FSDP2_ERROR(scaler.step(optimizer), kUsage, "synchronize_gradients()");
  handle.synchronize_gradients();
  EXPECT_EQ(gradient(), 16);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_EQ(gradient(), 1);
}

RANKS_TEST(GradScaler, GradientsInHalfPrecisionAreRefused, 2) {
  for (const bool sharded : {false, true}) {
    Linear layer = linear(2, 3), second = linear(2, 3);
    second->to(torch::kHalf);
    if (sharded) fsdp2::fully_shard(second);
    std::vector<Tensor> params = layer->parameters();
    params.push_back(second->weight);
    SGD optimizer(params, 1.0);
    fsdp2::GradScaler scaler({.init_scale = 16});
    scaler.scale(layer(torch::ones({1, 2})).sum() + second(torch::ones({1, 2}, torch::kHalf)).sum()).backward();
    EXPECT_FSDP2_ERROR(scaler.unscale_(optimizer), kUsage, "float16");
    EXPECT_EQ(max_difference(layer->weight.grad(), torch::full({3, 2}, 16.0)), 0);  // nothing was divided
  }
}

RANKS_TEST(GradScaler, ItsStateSurvivesACheckpoint, 2) {
  TempDir folder;
  const std::string path = fsdp2::all_gather_strings(folder.path())[0] + "/state";
  Tensor param = torch::zeros({2}, torch::requires_grad());
  SGD optimizer({param}, 1.0);
  auto saved = std::make_shared<fsdp2::GradScaler>(fsdp2::GradScalerOptions{.init_scale = 32, .growth_interval = 3});
  const auto train = [&](fsdp2::GradScaler& scaler, double value) {
    optimizer.zero_grad();
    scaler.scale((param * value).sum()).backward();
    scaler.step(optimizer);
    scaler.update();
  };
  for (const double value : {1.0, kInfinity, 1.0, 1.0}) train(*saved, value);
  fsdp2::dcp::save({{"scaler", saved}}, path);
  auto loaded = std::make_shared<fsdp2::GradScaler>();
  fsdp2::dcp::StateDict state{{"scaler", loaded}};
  fsdp2::dcp::load(state, path);
  EXPECT_EQ(loaded->get_scale(), 16);
  train(*loaded, 1.0);  // the third finite step after the infinity
  EXPECT_EQ(loaded->get_scale(), 32);
  EXPECT_FSDP2_ERROR(loaded->load_state_dict({{"scale", 2.0}}), kNotFound, "growth_factor");
  EXPECT_EQ(loaded->get_scale(), 32);
  fsdp2::barrier();
}

}  // namespace
