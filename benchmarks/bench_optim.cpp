// What DTensors cost an optimizer: the same step on a list of parameters as DTensors and as plain tensors, in turns,
// in one process and one thread. One JSON line per optimizer: medians in us per parameter, and the median over the
// rounds of their difference, which is what DTensors cost.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

struct Options {
  int64_t params = 200;
  int64_t numel = 64;
  int rounds = 51;
  int steps = 10;  // per round
  std::string only;
};

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app("Times optimizers on DTensors against plain tensors");
  app.add_option("--params", options.params, "how many parameters");
  app.add_option("--numel", options.numel, "elements of each");
  app.add_option("--rounds", options.rounds, "how often both are timed")->check(CLI::Range(1, 100000));
  app.add_option("--steps", options.steps, "steps per timing")->check(CLI::Range(1, 100000));
  app.add_option("--only", options.only, "one of the optimizers");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return options;
}

Tensors make_params(const Options& options, const fsdp2::DeviceMesh* mesh) {
  const auto tensor = [&](const Tensor& values) {
    return mesh == nullptr ? values : fsdp2::distribute_tensor(values, *mesh, {fsdp2::Shard{0}}).tensor();
  };
  torch::manual_seed(0);
  Tensors params;
  for (int64_t index = 0; index < options.params; ++index) {
    params.push_back(tensor(torch::randn({options.numel})).requires_grad_());
    params.back().mutable_grad() = tensor(torch::randn({options.numel}));
  }
  return params;
}

using Step = std::function<void()>;
using MakeStep = std::function<Step(const Tensors&)>;

template <class Optimizer>
Step step_of(std::shared_ptr<Optimizer> optimizer) {
  return [optimizer] { optimizer->step(); };
}

Step fused_lists(const Tensors& params) {
  torch::NoGradGuard no_grad;
  Tensors grads, first, second, steps;
  for (const Tensor& param : params) {
    grads.push_back(param.grad());
    first.push_back(torch::zeros_like(param));
    second.push_back(torch::zeros_like(param));
    steps.push_back(torch::ones({}));
  }
  return [=] {
    torch::NoGradGuard off;
    at::_fused_adamw_(params, grads, first, second, {}, steps, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false);
  };
}

std::map<std::string, MakeStep> all_steps() {
  using namespace torch::optim;
  const SGDOptions sgd = SGDOptions(1e-3).momentum(0.9);
  return {
      {"torch_adamw", [](const Tensors& p) { return step_of(std::make_shared<AdamW>(p, AdamWOptions(1e-3))); }},
      {"torch_sgd", [=](const Tensors& p) { return step_of(std::make_shared<SGD>(p, sgd)); }},
      {"fused_adamw_lists", fused_lists},
      {"fsdp2_adamw",
       [](const Tensors& p) { return step_of(std::make_shared<fsdp2::optim::AdamW>(p, AdamWOptions(1e-3))); }},
      {"fsdp2_adam",
       [](const Tensors& p) { return step_of(std::make_shared<fsdp2::optim::Adam>(p, AdamOptions(1e-3))); }},
      {"fsdp2_sgd", [=](const Tensors& p) { return step_of(std::make_shared<fsdp2::optim::SGD>(p, sgd)); }},
      {"clip_grad_norm", [](const Tensors& p) -> Step { return [=] { fsdp2::clip_grad_norm_(p, 1e9); }; }},
      {"clip_grad_norm_scaled", [](const Tensors& p) -> Step { return [=] { fsdp2::clip_grad_norm_(p, 0); }; }},
  };
}

double microseconds(const Step& step, int count) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) step();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void measure(const std::string& name, const MakeStep& make, const Options& options, const fsdp2::DeviceMesh& mesh) {
  const Tensors plain_params = make_params(options, nullptr), params = make_params(options, &mesh);
  const Step plain = make(plain_params), distributed = make(params);
  microseconds(plain, options.steps);
  microseconds(distributed, options.steps);
  std::vector<double> plain_times, times, differences;
  const double count = static_cast<double>(options.steps) * static_cast<double>(options.params);
  for (int round = 0; round < options.rounds; ++round) {
    plain_times.push_back(microseconds(plain, options.steps) / count);
    times.push_back(microseconds(distributed, options.steps) / count);
    differences.push_back(times.back() - plain_times.back());
  }
  std::cout << nlohmann::json{{"bench", "optim"},
                              {"optimizer", name},
                              {"params", options.params},
                              {"numel", options.numel},
                              {"plain_us", median(plain_times)},
                              {"dtensor_us", median(times)},
                              {"dtensor_cost_us", median(differences)}}
            << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  torch::set_num_threads(1);
  const auto file = std::filesystem::temp_directory_path() / ("bench_optim." + std::to_string(::getpid()));
  fsdp2::init_process_group({.backend = "gloo", .init_method = "file://" + file.string(), .rank = 0, .world_size = 1});
  const auto mesh = fsdp2::init_device_mesh(c10::DeviceType::CPU, {1});
  for (const auto& [name, make] : all_steps()) {
    if (options.only.empty() || options.only == name) measure(name, make, options, mesh);
  }
  fsdp2::destroy_process_group();
  std::filesystem::remove(file);
  return 0;
}
