// Checks and times everything that the library does on a device, in one program of a few minutes: parity with the
// unsharded model, prefetching, order of streams, mixed precision, CPU offload, optimizers, clipping, checkpoints,
// counters, memory, step time. Behind scripts/check_gpu.sh, for one GPU; runs on the CPU and on several ranks as well.
//
//   check_device [--device cuda] [--json FILE]           one process needs no launcher
//   OMP_NUM_THREADS=1 fsdp2 run --nproc-per-node 2 check_device --device cpu
//
// Prints one line a check. Exit code 0: all passed, 1: one failed, 3: the device is not there.

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fsdp2/fsdp2.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <sstream>

#include "device_run.h"

namespace {

using bench::Device;
using bench::Json;
using bench::kSmall;
using bench::OptimizerKind;
using bench::Run;
using bench::Setup;
using torch::Tensor;

constexpr int kNoDevice = 3;

struct Options {
  std::string device = "cuda", json;
  // Of the timed steps; the checks of values use a small model.
  llama::Config timed{.dim = 2048, .layers = 8, .heads = 16, .kv_heads = 8, .ffn = 5632, .vocab = 32000};
  int64_t timed_seq = 1024, timed_batch = 4;
  int timed_steps = 20;
};

double largest_ratio(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double off = std::abs(a[i] / b[i] - 1);
    largest = std::isnan(off) ? INFINITY : std::max(largest, off);
  }
  return largest;
}

double largest_difference(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, (a[i].to(torch::kFloat) - b[i].to(torch::kFloat)).abs().max().item<double>());
  }
  return largest;
}

struct Verdict {
  std::string result = "ok";  // ok, FAILED, skipped, info
  std::string text;
  Json numbers = Json::object();
};

Verdict expect(bool holds, const std::string& text, Json numbers = Json::object()) {
  return {holds ? "ok" : "FAILED", text, std::move(numbers)};
}

std::string in_words(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g", value);
  return text;
}

Verdict expect_at_most(double value, double limit, const std::string& what) {
  return expect(value <= limit, what + " " + in_words(value) + ", at most " + in_words(limit), {{"value", value}});
}

class Checks {
 public:
  Checks(const Options& options, Device device) : options_(options), device_(device) {}

  /// Returns how many failed. Collective; a check that throws has failed on all ranks or ends the job.
  int run() {
    const double start = bench::now();
    plain_ = train({.sharded = false});
    sharded_ = train({});
    check("losses", [&] { return like_plain(sharded_); });
    check("kept after forward", [&] { return like_plain(train({.sharding = {.reshard_after_forward = false}})); });
    check("prefetch two ahead", [&] { return like_sharded(train({.prepare = prefetch_two})); });
    check("host far ahead", [&] { return like_sharded(train({.before_step = keep_busy})); });
    check("optimizer on a side stream", [&] { return like_sharded(train({.side_stream = true})); });
    check("mixed precision", [&] { return mixed_precision(); });
    check("CPU offload", [&] { return cpu_offload(); });
    check("fused AdamW", [&] { return same_optimizer(OptimizerKind::kAdamW, OptimizerKind::kFusedAdamW); });
    check("fused SGD", [&] { return same_optimizer(OptimizerKind::kSGD, OptimizerKind::kFusedSGD); });
    check("clipped norm", [&] {
      return expect_at_most(largest_ratio(sharded_->norms(), plain_->norms()), 1e-4, "largest relative difference");
    });
    check("counters", [&] { return counters(); });
    check("checkpoint", [&] { return checkpoint(); });
    check("async checkpoint", [&] { return async_checkpoint(); });
    check("copies of a save to the host", [&] { return copies_to_host(); });
    plain_.reset();
    sharded_.reset();
    check("step time and memory, fp32", [&] { return step_time(false); });
    check("step time and memory, bf16", [&] { return step_time(true); });
    report_["seconds"] = bench::now() - start;
    return failed_;
  }

  const Json& report() const { return report_; }

 private:
  std::shared_ptr<Run> train(Setup setup) const {
    const int steps = setup.steps;
    auto run = std::make_shared<Run>(device_, std::move(setup));
    for (int i = 0; i < steps; ++i) run->step();
    return run;
  }

  void check(const std::string& name, const std::function<Verdict()>& body) {
    const double start = bench::now();
    Verdict verdict;
    try {
      verdict = body();
    } catch (const c10::Error& error) {
      verdict = expect(false, error.what_without_backtrace());
    } catch (const std::exception& error) {
      verdict = expect(false, error.what());
    }
    failed_ += verdict.result == "FAILED";
    Json entry{{"check", name}, {"result", verdict.result}, {"text", verdict.text}, {"seconds", bench::now() - start}};
    entry.update(verdict.numbers);
    report_["checks"].push_back(entry);
    if (fsdp2::get_rank() == 0 || verdict.result == "FAILED") {
      std::ostringstream line;
      line << std::left << std::setw(30) << name << std::setw(9) << verdict.result << verdict.text << "\n";
      std::cout << line.str() << std::flush;
    }
  }

  Verdict like_plain(const std::shared_ptr<Run>& run) const {
    // Another order of sums, and on a GPU other kernels where shapes differ.
    return expect_at_most(largest_ratio(run->losses(), plain_->losses()), 1e-4, "from the plain model's: relative");
  }

  Verdict like_sharded(const std::shared_ptr<Run>& run) const {
    return expect_at_most(largest_ratio(run->losses(), sharded_->losses()), 1e-5, "from the default's: relative");
  }

  static void prefetch_two(llama::Llama& model) {
    const auto blocks = model->blocks();
    std::vector<fsdp2::FSDPModule> handles;
    for (const auto& block : blocks) handles.push_back(fsdp2::fsdp_module(block));
    for (size_t i = 0; i < handles.size(); ++i) {
      std::vector<fsdp2::FSDPModule> next, previous;
      for (size_t ahead = 1; ahead <= 2; ++ahead) {
        if (i + ahead < handles.size()) next.push_back(handles[i + ahead]);
        if (i >= ahead) previous.push_back(handles[i - ahead]);
      }
      handles[i].set_modules_to_forward_prefetch(next);
      handles[i].set_modules_to_backward_prefetch(previous);
    }
  }

  /// Work in front of the step, so that the host issues all of it before the device begins.
  static void keep_busy(const Tensor& like) {
    const int64_t side = like.is_cpu() ? 64 : 4096;
    Tensor square = torch::ones({side, side}, like.options().dtype(torch::kFloat)) / static_cast<double>(side);
    for (int i = 0; i < 40; ++i) square = square.mm(square);
  }

  Verdict mixed_precision() const {
    fsdp2::reset_counters();
    const auto run =
        train({.sharding = {.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}}});
    bool kept = true;
    for (const Tensor& param : run->model()->parameters()) kept &= param.scalar_type() == torch::kFloat;
    const double peak = static_cast<double>(fsdp2::counters().unsharded_bytes_peak);
    const double all = 2.0 * static_cast<double>(fsdp2::num_parameters(run->model()));
    const double off = largest_ratio(run->losses(), plain_->losses());
    return expect(kept && off < 0.02 && peak > 0 && peak <= all,
                  "losses from fp32's: relative " + in_words(off) + "; shards in fp32, whole parameters in bf16 (" +
                      in_words(peak / all) + " of all at the peak)",
                  {{"value", off}});
  }

  Verdict cpu_offload() const {
    const auto run = train({.sharding = {.offload_policy = fsdp2::CPUOffloadPolicy{}}});
    bool on_cpu = true, pinned = true;
    for (const Tensor& param : run->model()->parameters()) {
      const Tensor local = fsdp2::DTensor(param).to_local();
      on_cpu &= local.is_cpu();
      pinned &= local.numel() == 0 || local.is_pinned();
    }
    const double off = largest_ratio(run->losses(), plain_->losses());
    return expect(on_cpu && (pinned || device_.is_cpu()) && off < 1e-4,
                  std::string("shards on the CPU: ") + (on_cpu ? "yes" : "no") + ", pinned: " +
                      (pinned ? "yes" : "no") + "; losses from the plain model's: relative " + in_words(off),
                  {{"value", off}});
  }

  Verdict same_optimizer(OptimizerKind stock, OptimizerKind fused) const {
    const auto ours = train({.optimizer = fused}), theirs = train({.sharded = false, .optimizer = stock});
    return expect_at_most(largest_difference(ours->whole_parameters(), theirs->whole_parameters()), 2e-4,
                          "weights from the plain model's with the stock one: largest difference");
  }

  Verdict counters() const {
    Run run(device_, {});
    run.step();
    fsdp2::reset_counters();
    run.step();
    const fsdp2::Counters counts = fsdp2::counters();
    const int64_t layers = kSmall.layers, world = fsdp2::get_world_size();
    const int64_t gathers = world > 1 ? 1 + 2 * layers : 0, reductions = world > 1 ? 1 + layers : 0;
    return expect(counts.all_gathers == gathers && counts.reduce_scatters == reductions,
                  std::to_string(counts.all_gathers) + " gathers and " + std::to_string(counts.reduce_scatters) +
                      " reductions a step, expected " + std::to_string(gathers) + " and " + std::to_string(reductions),
                  {{"bytes", counts.bytes}});
  }

  static fsdp2::dcp::StateDict state_of(Run& run) {
    return {{"model", fsdp2::get_model_state_dict(run.model())},
            {"optim", fsdp2::get_optimizer_state_dict(run.model(), run.optimizer())}};
  }

  /// A fresh run that goes on from `path`, and takes `steps` more.
  std::shared_ptr<Run> resume(const std::string& path) const {
    auto run = std::make_shared<Run>(device_, Setup{});
    auto state = state_of(*run);
    fsdp2::dcp::load(state, path);
    fsdp2::set_state_dict(run->model(), run->optimizer(), state["model"].dict(), state["optim"].dict());
    return run;
  }

  /// The same folder on every rank; removed by the caller.
  static std::string folder() {
    static int made = 0;
    const auto base = std::filesystem::temp_directory_path();
    const std::string mine = (base / ("check_device." + std::to_string(::getpid()) + "." + std::to_string(made++)));
    return fsdp2::all_gather_strings(mine).front();
  }

  static void remove(const std::string& path) {
    fsdp2::barrier();
    if (fsdp2::get_rank() == 0) std::filesystem::remove_all(path);
  }

  Verdict checkpoint() const {
    const std::string path = folder();
    Run run(device_, {});
    run.step();
    run.step();
    const double start = bench::now();
    fsdp2::dcp::save(state_of(run), path);
    const double saved = bench::now();
    const auto resumed = resume(path);
    const double loaded = bench::now();
    const double off = largest_difference(run.whole_parameters(), resumed->whole_parameters());
    const double moment = optimizer_difference(run, *resumed);
    remove(path);
    return expect(off == 0 && moment == 0,
                  "weights and moments differ by " + in_words(std::max(off, moment)) + "; save " +
                      in_words(1e3 * (saved - start)) + " ms, load " + in_words(1e3 * (loaded - saved)) + " ms",
                  {{"save_ms", 1e3 * (saved - start)}, {"load_ms", 1e3 * (loaded - saved)}});
  }

  static double optimizer_difference(Run& a, Run& b) {
    const auto first = fsdp2::get_optimizer_state_dict(a.model(), a.optimizer(),
                                                       {.full_state_dict = true, .flatten_optimizer_state_dict = true});
    const auto second = fsdp2::get_optimizer_state_dict(
        b.model(), b.optimizer(), {.full_state_dict = true, .flatten_optimizer_state_dict = true});
    double largest = first.size() == second.size() ? 0 : INFINITY;
    for (const auto& [key, value] : first) {
      if (value.kind() != fsdp2::dcp::Kind::Tensor) continue;
      const Tensor ours = value.tensor().cpu().to(torch::kDouble);
      largest = std::max(largest, (ours - second.at(key).tensor().cpu().to(torch::kDouble)).abs().max().item<double>());
    }
    return largest;
  }

  Verdict async_checkpoint() const {
    const std::string path = folder();
    Run run(device_, {});
    run.step();
    const std::vector<Tensor> before = run.whole_parameters();
    const double start = bench::now();
    auto future = fsdp2::dcp::async_save(state_of(run), path);
    const double returned = bench::now();
    run.step();  // writes into what is being saved
    future.get();
    const double written = bench::now();
    const auto resumed = resume(path);
    const double off = largest_difference(before, resumed->whole_parameters());
    remove(path);
    return expect(off == 0,
                  "the weights at the call, not those of the step after it: differ by " + in_words(off) +
                      "; returned after " + in_words(1e3 * (returned - start)) + " ms of " +
                      in_words(1e3 * (written - start)),
                  {{"blocking_ms", 1e3 * (returned - start)}, {"total_ms", 1e3 * (written - start)}});
  }

  /// How often a save moves the bytes of a replicated tensor to the host; known to be twice on several ranks.
  Verdict copies_to_host() const {
    if (device_.is_cpu()) return {"skipped", "on the CPU nothing is copied to the host"};
    static std::atomic<int64_t> bytes;
    bytes = 0;
    const auto count = [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
      const auto inputs = call.inputs();
      if (inputs.size() >= 2 && inputs[0].isTensor() && inputs[1].isTensor()) {
        const Tensor &to = inputs[0].toTensor(), &from = inputs[1].toTensor();
        if (to.defined() && from.defined() && to.is_cpu() && !from.is_cpu()) bytes += from.nbytes();
      }
      return nullptr;
    };
    const auto callback =
        at::addGlobalCallback(at::RecordFunctionCallback(count).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
    const std::string path = folder();
    const Tensor replicated = torch::ones({1 << 20}, device_.device);
    fsdp2::dcp::save({{"replicated", replicated}}, path);
    at::removeCallback(callback);
    remove(path);
    const double times = static_cast<double>(bytes.load()) / static_cast<double>(replicated.nbytes());
    return {"info",
            "a replicated tensor is copied " + in_words(times) + " times by one save; once is enough",
            {{"value", times}}};
  }

  struct Timed {
    std::vector<double> step_ms, issue_ms;
    double peak_mib = 0;
  };

  /// Steps of the larger model, which starts from its own random weights: only time and memory are looked at.
  Verdict step_time(bool bf16) const {
    const auto build = [&](bool sharded) {
      const torch::Device device = device_.device;
      torch::manual_seed(0);
      llama::Llama model(options_.timed);
      model->to(device);
      if (sharded) {
        fsdp2::FullyShardOptions sharding{
            .mesh = fsdp2::init_device_mesh(device.type(), {fsdp2::get_world_size()}, {"shard"})};
        if (bf16) sharding.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
        llama::shard(model, sharding);
      } else if (bf16) {
        model->to(torch::kBFloat16);  // less than mixed precision does: no casts, moments in bf16
      }
      return model;
    };
    Timed timed[2];
    for (const bool sharded : {false, true}) {
      auto model = build(sharded);
      fsdp2::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-4));
      const Tensor tokens = torch::randint(options_.timed.vocab, {options_.timed_batch, options_.timed_seq},
                                           torch::TensorOptions(torch::kLong).device(device_.device));
      for (int i = -3; i < options_.timed_steps; ++i) {
        if (i == 0) device_.forget_peak();
        device_.synchronize();
        fsdp2::barrier();
        const double start = bench::now();
        torch::nn::functional::cross_entropy(model(tokens).flatten(0, 1).to(torch::kFloat), tokens.flatten())
            .backward();
        optimizer.step();
        optimizer.zero_grad();
        const double issued = bench::now();
        device_.synchronize();
        if (i < 0) continue;
        timed[sharded].step_ms.push_back(1e3 * (bench::now() - start));
        timed[sharded].issue_ms.push_back(1e3 * (issued - start));
      }
      timed[sharded].peak_mib = device_.peak_mib();
    }
    const double plain = bench::median(timed[0].step_ms), ours = bench::median(timed[1].step_ms);
    Verdict verdict{"info", in_words(ours) + " ms a step, " + in_words(ours / plain) +
                                " of the plain model's; issued in " + in_words(bench::median(timed[1].issue_ms)) +
                                " ms; peak " + in_words(timed[1].peak_mib) + " MiB, plain " +
                                in_words(timed[0].peak_mib)};
    verdict.numbers = {{"step_ms", ours},
                       {"plain_step_ms", plain},
                       {"ratio", ours / plain},
                       {"issue_ms", bench::median(timed[1].issue_ms)},
                       {"plain_issue_ms", bench::median(timed[0].issue_ms)},
                       {"peak_mib", timed[1].peak_mib},
                       {"plain_peak_mib", timed[0].peak_mib}};
    return verdict;
  }

  Options options_;
  Device device_;
  std::shared_ptr<Run> plain_, sharded_;
  Json report_{{"checks", Json::array()}};
  int failed_ = 0;
};

/// One process without a launcher is a job of its own.
void join() {
  fsdp2::ProcessGroupOptions options;
  if (std::getenv("RANK") == nullptr) {
    options.rank = 0;
    options.world_size = 1;
    options.init_method =
        "file://" +
        (std::filesystem::temp_directory_path() / ("check_device.store." + std::to_string(::getpid()))).string();
  }
  fsdp2::init_process_group(options);
}

int run(const Options& options) {
  bench::limit_threads();
  const bool cuda = options.device == "cuda";
  if (cuda && (!at::hasCUDA() || c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount() == 0)) {
    std::cerr << "check_device: there is no GPU here"
              << (at::hasCUDA() ? "" : ", and this libtorch is a build without CUDA") << std::endl;
    return kNoDevice;
  }
  join();
  const Device device{cuda ? fsdp2::local_device() : c10::Device(c10::kCPU)};
  int failed = 0;
  {
    Checks checks(options, device);
    failed = checks.run();
    if (fsdp2::get_rank() == 0) {
      Json report{{"device", device.device.str()},
                  {"torch", TORCH_VERSION},
                  {"world_size", fsdp2::get_world_size()},
                  {"failed", failed}};
      report.update(checks.report());
      if (!options.json.empty()) std::ofstream(options.json) << bench::rounded(report).dump(1) << "\n";
      std::cout << (failed == 0 ? "all passed" : std::to_string(failed) + " failed") << " on " << device.device.str()
                << ", torch " << TORCH_VERSION << ", " << fsdp2::get_world_size() << " rank(s)" << std::endl;
    }
  }
  fsdp2::destroy_process_group();
  return failed == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Checks and times what the library does on a device");
  app.add_option("--device", options.device)->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--json", options.json, "file for the results");
  app.add_option("--dim", options.timed.dim, "of the model that is timed");
  app.add_option("--layers", options.timed.layers);
  app.add_option("--heads", options.timed.heads);
  app.add_option("--kv-heads", options.timed.kv_heads);
  app.add_option("--ffn", options.timed.ffn);
  app.add_option("--vocab", options.timed.vocab);
  app.add_option("--seq", options.timed_seq);
  app.add_option("--batch", options.timed_batch);
  app.add_option("--steps", options.timed_steps)->check(CLI::PositiveNumber);
  int result = 0;
  const int parsed = bench::run_main(app, argc, argv, [&] { result = run(options); });
  return parsed != 0 ? parsed : result;
}
