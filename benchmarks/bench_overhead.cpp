// Host time per wrapped module: a stack of tiny Linear layers, each given to fully_shard, against the same stack left
// plain. Microseconds a module for forward and backward together, over the plain stack, on the slowest rank.
// peer_overhead.py is the Python twin.
//
//   OMP_NUM_THREADS=1 fsdp2 run --nproc-per-node 2 bench_overhead --dims 8,64 --layers 32
//
// The variants take turns, in reverse order every other round: plain; NAME/reshard and NAME/keep, where NAME is the
// backend and reshard_after_forward true or false; stub/reshard and stub/keep with local copies in place of the
// collectives. One rank has no collectives, and so no stub.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include "quiet.h"
#include "stub_collectives.h"

namespace {

using bench::Json;

struct Options {
  std::vector<int64_t> dims{8, 64};
  int layers = 32, rounds = 40;
  int64_t batch = 1;
  double max_wait = 90;
  bool pin = false;
  std::string backend, tag;
};

/// A model, and microseconds a layer of each round.
struct Variant {
  std::string name;
  torch::nn::Sequential model;
  std::vector<double> forward{}, both{};
};

torch::nn::Sequential make_stack(int64_t dim, int layers, const std::string& name) {
  torch::manual_seed(0);
  torch::nn::Sequential stack;
  for (int i = 0; i < layers; ++i) stack->push_back(torch::nn::Linear(torch::nn::LinearOptions(dim, dim).bias(false)));
  if (name == "plain") return stack;
  const bool reshard = name.ends_with("/reshard");
  for (const auto& layer : stack->children()) {
    auto module = fsdp2::fully_shard(layer, {.reshard_after_forward = reshard});
    if (name.starts_with("stub/")) {
      module.set_custom_all_gather(std::make_shared<bench::StubAllGather>());
      module.set_custom_reduce_scatter(std::make_shared<bench::StubReduceScatter>());
    }
  }
  fsdp2::fully_shard(stack);
  return stack;
}

void time_round(Variant& variant, const at::Tensor& x, int layers) {
  fsdp2::barrier();
  const double start = bench::now();
  const at::Tensor y = fsdp2::call(variant.model, x).sum();
  const double between = bench::now();
  y.backward();
  const double end = bench::now();
  for (const at::Tensor& parameter : variant.model->parameters()) parameter.mutable_grad() = at::Tensor();
  variant.forward.push_back((between - start) / layers * 1e6);
  variant.both.push_back((end - start) / layers * 1e6);
}

/// Of the slowest rank, in the rounds that count.
std::vector<double> slowest(const std::vector<Json>& everyone, const char* what, const std::string& name,
                            const std::vector<int>& kept) {
  std::vector<double> result;
  for (const int i : kept) {
    double most = 0;
    for (const Json& rank : everyone) most = std::max(most, rank[what][name][i].get<double>());
    result.push_back(most);
  }
  return result;
}

std::vector<double> differences(std::vector<double> values, const std::vector<double>& base) {
  for (size_t i = 0; i < values.size(); ++i) values[i] -= base[i];
  return values;
}

void bench_dim(const Options& o, int64_t dim) {
  const std::string backend = o.backend.empty() ? "default" : o.backend;
  std::vector<std::string> names{"plain", backend + "/reshard", backend + "/keep"};
  if (fsdp2::get_world_size() > 1) names.insert(names.end(), {"stub/reshard", "stub/keep"});
  std::vector<Variant> variants;
  for (const std::string& name : names) variants.push_back({.name = name, .model = make_stack(dim, o.layers, name)});
  const at::Tensor x = torch::randn({o.batch, dim});
  const auto round = [&](int index) {
    for (size_t i = 0; i < variants.size(); ++i) {
      time_round(variants[index % 2 == 0 ? i : variants.size() - 1 - i], x, o.layers);
    }
  };
  constexpr int kWarmup = 3;
  for (int i = 0; i < kWarmup; ++i) round(i);
  bench::Quiet quiet(o.rounds, {.wait_seconds = o.max_wait});
  std::vector<int> kept = quiet.run(round);
  for (int& i : kept) i += kWarmup;
  Json mine;
  for (const Variant& variant : variants) {
    mine["forward"][variant.name] = variant.forward;
    mine["both"][variant.name] = variant.both;
  }
  const std::vector<Json> everyone = bench::gather(mine);
  if (fsdp2::get_rank() != 0) return;
  const auto base = slowest(everyone, "both", "plain", kept),
             base_forward = slowest(everyone, "forward", "plain", kept);
  Json record{{"bench", "overhead"}, {"tag", o.tag},       {"world", everyone.size()},
              {"dim", dim},          {"layers", o.layers}, {"plain_us_per_module", bench::median(base)}};
  for (size_t i = 1; i < names.size(); ++i) {
    const auto both = slowest(everyone, "both", names[i], kept);
    const auto over = differences(both, base);
    record[names[i]] = {
        {"over_us", bench::median(over)},
        {"over_us_p10", bench::quantile(over, 0.1)},
        {"over_us_p90", bench::quantile(over, 0.9)},
        {"ratio", bench::median(bench::ratios(both, base))},
        {"over_fwd_us", bench::median(differences(slowest(everyone, "forward", names[i], kept), base_forward))}};
  }
  record["noise"] = quiet.noise();
  bench::print_line(bench::rounded(record));
}

void run(const Options& o) {
  bench::limit_threads();
  fsdp2::init_process_group({.backend = o.backend});
  if (o.pin) bench::pin_to_core(fsdp2::get_local_rank());
  for (const int64_t dim : o.dims) bench_dim(o, dim);
  fsdp2::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Times the hooks of fully_shard, in microseconds a wrapped module");
  app.option_defaults()->always_capture_default();
  app.add_option("--dims", o.dims, "widths of the layers")->delimiter(',');
  app.add_option("--layers", o.layers, "of a stack")->check(CLI::PositiveNumber);
  app.add_option("--batch", o.batch, "rows of the input");
  app.add_option("--rounds", o.rounds, "rounds to keep")->check(CLI::PositiveNumber);
  app.add_flag("--pin", o.pin, "rank r on core r modulo the cores");
  app.add_option("--backend", o.backend, "of the process group; empty: the library's choice");
  app.add_option("--tag", o.tag, "repeated in the JSON lines");
  app.add_option("--max-wait", o.max_wait, "seconds to wait for a quiet machine, all waits together");
  return bench::run_main(app, argc, argv, [&] { run(o); });
}
