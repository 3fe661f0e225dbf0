// Times training steps of a Llama-style decoder under the library and its reference points. peer_train.py is its Python
// twin: the same flags, weights, tokens, rounds and JSON lines.
//
//   OMP_NUM_THREADS=1 fsdp2 run --nproc-per-node 2 bench_train --mode fsdp2,nocomm --steps 20
//
// Modes
//   fsdp2   fully_shard on each block and on the whole (embedding, last norm and head are the root's group).
//   nocomm  the ideal: the plain model, nothing wrapped, nothing exchanged. Forward and backward on the rank's own
//           micro-batch; clipping and the optimizer on the rank's 1/N of each parameter only. With --mp the model is
//           bf16, and the shards that are trained are fp32. Its weights drift from those of a real run: for times only.
//   stub    fsdp2 with local copies of the same bytes in place of the collectives.
//   local   the plain model with its whole optimizer, nothing exchanged: the truth for one rank.
//   ddp     DistributedDataParallel, once the library has it.
//
// Several modes take turns step by step, in reverse order every other step. Each step starts after a barrier; a step
// takes as long as on its slowest rank. Only steps during which the rest of the machine was quiet count (quiet.h). One
// JSON line a mode, with the median over the steps of its ratio to each other mode.
// A single mode also reports memory: `rss_peak_over_start_mb` is the peak of resident memory during the steps over
// what the process had before the model, `pss_peak_over_start_mb` the same with shared pages divided by their users,
// sampled after forward, backward and optimizer of two more steps.

#include <algorithm>
#include <iostream>
#include <sstream>

#include "hash_rule.h"
#include "quiet.h"
#include "range_profile.h"
#include "trainer.h"

namespace {

using bench::Json;
using bench::Trainer;

struct Options {
  bench::TrainOptions train;
  int steps = 20, warmup = 3;
  double max_wait = 90;
  std::string modes = "fsdp2", tag, backend;
  bool profile = false, pin = false, check_init = false;
  std::string arguments;
};

void add_flags(CLI::App& app, Options& o) {
  app.option_defaults()->always_capture_default();
  app.add_option("--dim", o.train.model.dim, "width of the model");
  app.add_option("--layers", o.train.model.layers, "number of blocks");
  app.add_option("--heads", o.train.model.heads, "query heads");
  app.add_option("--kv-heads", o.train.model.kv_heads, "key and value heads");
  app.add_option("--ffn", o.train.model.ffn, "width inside the feed-forward part");
  app.add_option("--vocab", o.train.model.vocab, "number of tokens there are");
  app.add_option("--seq", o.train.seq, "tokens of a sequence");
  app.add_option("--batch", o.train.batch, "sequences of a micro-batch, per rank");
  app.add_option("--grad-accum", o.train.grad_accum, "micro-batches of a step; only the last one reduces");
  app.add_option("--steps", o.steps, "steps to keep")->check(CLI::PositiveNumber);
  app.add_option("--warmup", o.warmup, "steps before them");
  app.add_option("--mode", o.modes, "fsdp2, nocomm, stub, local, ddp, or a list to take turns");
  app.add_option("--dtype", o.train.dtype, "of the model")->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_flag("--mp", o.train.mp, "MixedPrecisionPolicy with bf16 parameters and fp32 reduction");
  app.add_option("--reshard-after-forward", o.train.reshard_after_forward, "default, always, never or a number")
      ->check(CLI::IsMember({"default", "always", "never"}) | CLI::PositiveNumber);
  app.add_option("--clip", o.train.clip, "largest gradient norm; 0: no clipping");
  app.add_option("--opt-impl", o.train.opt_impl, "default: torch::optim::AdamW; fused: fsdp2::optim::AdamW")
      ->check(CLI::IsMember({"default", "fused"}));
  app.add_option("--lr", o.train.lr, "learning rate");
  app.add_flag("--profile", o.profile, "split the time inside the library; for a single mode");
  app.add_flag("--pin", o.pin, "rank r on core r modulo the cores");
  app.add_option("--tag", o.tag, "repeated in the JSON lines");
  app.add_flag("--check-init", o.check_init, "print check sums of the weights, train nothing");
  app.add_option("--backend", o.backend, "of the process group; empty: the library's choice");
  app.add_option("--max-wait", o.max_wait, "seconds to wait for a quiet machine, all waits together");
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream in(list);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

void check_init(const Options& o) {
  const auto model = bench::build_model(o.train);
  for (const auto& item : model->named_parameters()) {
    const at::Tensor values = item.value().detach().to(torch::kFloat32).flatten();
    std::vector<std::string> first;
    for (int64_t i = 0; i < std::min<int64_t>(3, values.numel()); ++i) {
      char text[40];
      std::snprintf(text, sizeof(text), "%a", values[i].item<double>());
      first.emplace_back(text);
    }
    bench::print_line({{"fqn", item.key()},
                       {"shape", item.value().sizes().vec()},
                       {"first", first},
                       {"bitsum", values.view(torch::kInt32).to(torch::kInt64).sum().item<int64_t>()}});
  }
}

/// What one rank knows of its run.
Json own_results(const std::vector<std::unique_ptr<Trainer>>& trainers) {
  Json result = Json::array();
  for (const auto& trainer : trainers) {
    Json mode{{"loss", trainer->losses()}};
    for (const bench::StepTimes& times : trainer->times()) {
      mode["step"].push_back(times.step);
      mode["forward"].push_back(times.forward);
      mode["backward"].push_back(times.backward);
      mode["clip"].push_back(times.clip);
      mode["optim"].push_back(times.optim);
    }
    result.push_back(mode);
  }
  return result;
}

double mean(const std::vector<Json>& ranks, const std::function<double(const Json&)>& value) {
  double total = 0;
  for (const Json& rank : ranks) total += value(rank);
  return total / static_cast<double>(ranks.size());
}

class Bench {
 public:
  explicit Bench(Options options) : o_(std::move(options)) {
    start_ = bench::memory().resident;
    start_proportional_ = bench::proportional_memory();
    for (const std::string& mode : split(o_.modes)) {
      trainers_.push_back(std::make_unique<Trainer>(mode, o_.train));
    }
  }

  void run() {
    for (int i = 0; i < o_.warmup; ++i) round(i);
    if (o_.profile) profile_.emplace();
    const double cpu = bench::own_cpu_seconds();
    const double peak_before = bench::memory().peak_resident - start_;
    bench::forget_peak_resident();
    bench::Quiet quiet(o_.steps, {.wait_seconds = o_.max_wait});
    kept_ = quiet.run([&](int i) { round(o_.warmup + i); });
    for (int& i : kept_) i += o_.warmup;
    Json mine{{"modes", own_results(trainers_)},
              {"cpu", bench::own_cpu_seconds() - cpu},
              {"rss_init", peak_before},
              {"rss", bench::memory().peak_resident - start_}};
    if (profile_) {
      for (const auto& [name, range] : profile_->ranges()) mine["ranges"][name] = {range.seconds, range.calls};
    }
    if (trainers_.size() == 1) mine["pss"] = sample_proportional_memory();
    everyone_ = bench::gather(mine);
    if (fsdp2::get_rank() != 0) return;
    for (size_t i = 0; i < trainers_.size(); ++i) report(i, quiet.noise());
  }

 private:
  void round(int index) {
    const size_t count = trainers_.size();
    for (size_t i = 0; i < count; ++i) trainers_[index % 2 == 0 ? i : count - 1 - i]->step(index);
  }

  double sample_proportional_memory() {
    double peak = 0;
    const auto sample = [&] { peak = std::max(peak, bench::proportional_memory() - start_proportional_); };
    const auto done = static_cast<int64_t>(trainers_[0]->times().size());
    for (int64_t i = 0; i < 2; ++i) trainers_[0]->step(done + i, sample);
    return peak;
  }

  /// Seconds of the slowest rank in each kept step.
  std::vector<double> step_seconds(size_t mode) const {
    std::vector<double> result;
    for (const int i : kept_) {
      double slowest = 0;
      for (const Json& rank : everyone_) slowest = std::max(slowest, rank["modes"][mode]["step"][i].get<double>());
      result.push_back(slowest);
    }
    return result;
  }

  std::vector<double> all_ranks(const char* what) const {
    std::vector<double> result;
    for (const Json& rank : everyone_) result.push_back(rank[what].get<double>());
    return result;
  }

  void report(size_t mode, const Json& noise) const {
    const Trainer& trainer = *trainers_[mode];
    const std::vector<double> steps = step_seconds(mode);
    const double ms = bench::median(steps) * 1e3;
    Json parts, to_others = Json::object();
    for (const char* part : {"forward", "backward", "clip", "optim"}) {
      std::vector<double> means;
      for (const int i : kept_) {
        means.push_back(mean(everyone_, [&](const Json& rank) { return rank["modes"][mode][part][i].get<double>(); }));
      }
      parts[part] = bench::median(means) * 1e3;
    }
    for (size_t other = 0; other < trainers_.size(); ++other) {
      if (other == mode) continue;
      to_others[trainers_[other]->mode()] = bench::median(bench::ratios(steps, step_seconds(other)));
    }
    const auto& t = o_.train;
    Json record{{"bench", "train"},
                {"mode", trainer.mode()},
                {"tag", o_.tag},
                {"backend", o_.backend},
                {"world", fsdp2::get_world_size()},
                {"params", trainer.num_parameters()},
                {"step_ms", ms},
                {"p10", bench::quantile(steps, 0.1) * 1e3},
                {"p90", bench::quantile(steps, 0.9) * 1e3},
                {"tok_s_rank", static_cast<double>(t.batch * t.seq * t.grad_accum) / ms * 1e3},
                {"parts_ms", parts},
                {"ratio_to", to_others}};
    if (trainers_.size() == 1) {
      double cpu = 0;
      for (const double seconds : all_ranks("cpu")) cpu += seconds;
      record["cpu_ms_per_step_all_ranks"] = cpu / measured_steps() * 1e3;
      record["rss_peak_over_start_mb"] = all_ranks("rss");
      record["rss_peak_init_mb"] = all_ranks("rss_init");
      record["pss_peak_over_start_mb"] = all_ranks("pss");
    }
    record["noise"] = noise;
    if (profile_) add_split(mode, record);
    record = bench::rounded(record);
    std::vector<double> losses;
    for (int i = 0; i < o_.warmup + o_.steps; ++i) {
      losses.push_back(mean(everyone_, [&](const Json& rank) { return rank["modes"][mode]["loss"][i].get<double>(); }));
    }
    record["loss"] = bench::rounded(losses, 9);
    record["args"] = o_.arguments;
    bench::print_line(record);
  }

  double measured_steps() const { return static_cast<double>(everyone_[0]["modes"][0]["step"].size()) - o_.warmup; }

  /// Means over all measured steps and ranks, kept or not.
  void add_split(size_t mode, Json& record) const {
    const double count = measured_steps() * static_cast<double>(everyone_.size());
    std::map<std::string, double> split, calls;
    double step = 0, optimizer = 0;
    for (const Json& rank : everyone_) {
      const Json& times = rank["modes"][mode];
      for (size_t i = static_cast<size_t>(o_.warmup); i < times["step"].size(); ++i) {
        step += times["step"][i].get<double>() / count;
        optimizer += (times["optim"][i].get<double>() + times["clip"][i].get<double>()) / count;
      }
      if (!rank.contains("ranges")) continue;
      for (const auto& [name, range] : rank["ranges"].items()) {
        split[name] += range[0].get<double>() / count;
        calls[name] += range[1].get<double>() / count;
      }
    }
    double rest = step - optimizer;
    for (const auto& [name, seconds] : split) rest -= seconds;
    split["optimizer+clip"] = optimizer;
    split["compute fwd+bwd (rest)"] = rest;
    std::vector<std::pair<double, std::string>> sorted;
    for (const auto& [name, seconds] : split) sorted.emplace_back(seconds * 1e3, name);
    std::sort(sorted.rbegin(), sorted.rend());
    for (const auto& [ms, name] : sorted) record["split_ms"][name] = ms;
    record["calls_per_step"] = calls;
  }

  Options o_;
  double start_ = 0, start_proportional_ = 0;
  std::vector<std::unique_ptr<Trainer>> trainers_;
  std::optional<bench::RangeProfile> profile_;
  std::vector<int> kept_;
  std::vector<Json> everyone_;
};

void run(Options& o) {
  if (o.check_init) return check_init(o);
  FSDP2_CHECK(!o.profile || o.modes.find(',') == std::string::npos, kInvalidArgument, "[bench] --profile with --mode ",
              o.modes, ": ranges do not say whose they are; give a single mode");
  bench::limit_threads();
  fsdp2::init_process_group({.backend = o.backend});
  if (o.pin) bench::pin_to_core(fsdp2::get_local_rank());
  Bench(o).run();
  fsdp2::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Times training steps under the library and its reference points");
  add_flags(app, options);
  for (int i = 1; i < argc; ++i) options.arguments += (i > 1 ? " " : "") + std::string(argv[i]);
  return bench::run_main(app, argc, argv, [&] { run(options); });
}
