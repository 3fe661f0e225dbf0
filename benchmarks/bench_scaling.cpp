// One rank of a large job, without the others: what a training step of a Llama costs the host, and what it sends.
//
//   bench_scaling --world 1024                      Llama 3.1 8B, the default
//   bench_scaling --world 1024 --replicas 128       HSDP, 8 ranks to a replica
//
// The model stays on the meta device and the backend is "fake" (fsdp2/fake_backend.h), so there is no arithmetic and no
// memory: what is left is the time in which a host issues the step. "plain" is the same model without fully_shard,
// interleaved step by step. Prints one JSON line: times in ms, medians; calls and bytes of one step by process group,
// beside what the shapes of the parameters say.

#include <fsdp2/fsdp2.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "measure.h"
#include "model.h"

namespace {

using bench::Json;

struct Options {
  int world = 1024, rank = 0, replicas = 1, steps = 15;
  int64_t seq = 8192, batch = 1;
  llama::Config model{.dim = 4096, .layers = 32, .heads = 32, .kv_heads = 8, .ffn = 14336, .vocab = 128256};
  std::string param_dtype = "bf16";
  bool keep = false;
};

// Some operators of the model have no meta kernels in C++.
torch::Tensor select_on_meta(const torch::Tensor& self, int64_t dim, const torch::Tensor& index) {
  std::vector<int64_t> sizes = self.sizes().vec();
  sizes[static_cast<size_t>(dim)] = index.numel();
  return torch::empty(sizes, self.options());
}

torch::Tensor embedding_gradient_on_meta(const torch::Tensor& gradient, const torch::Tensor& /*indices*/,
                                         c10::SymInt rows, c10::SymInt /*padding_index*/, bool /*by_frequency*/) {
  return torch::empty({rows.expect_int(), gradient.size(-1)}, gradient.options());
}

/// One operator forward and one backward, as the fused kernels of a GPU are.
struct AttentionOnMeta : torch::autograd::Function<AttentionOnMeta> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& q,
                               const torch::Tensor& k, const torch::Tensor& v) {
    context->save_for_backward({q, k, v});
    return torch::empty_like(q);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               const torch::autograd::tensor_list& /*gradients*/) {
    torch::autograd::tensor_list gradients;
    for (const torch::Tensor& saved : context->get_saved_variables()) gradients.push_back(torch::empty_like(saved));
    return gradients;
  }
};

torch::Tensor attention_on_meta(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                                const std::optional<torch::Tensor>& /*mask*/, double /*dropout*/, bool /*causal*/,
                                std::optional<double> /*scale*/, bool /*grouped*/) {
  return AttentionOnMeta::apply(q, k, v);
}

TORCH_LIBRARY_IMPL(aten, AutogradMeta, library) {
  library.impl("scaled_dot_product_attention", TORCH_FN(attention_on_meta));
}

TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("index_select", TORCH_FN(select_on_meta));
  library.impl("embedding_dense_backward", TORCH_FN(embedding_gradient_on_meta));
}

llama::Llama meta_model(const Options& options) {
  const fsdp2::MetaDeviceGuard meta;
  llama::Llama model(options.model);
  return model;
}

/// Seconds of forward and backward on meta tokens, and of the optimizer where one is given.
struct Times {
  std::vector<double> forward, backward, optimizer, step;
};

void step(llama::Llama& model, torch::optim::Optimizer& optimizer, const torch::Tensor& tokens, Times* times) {
  const double start = bench::now();
  const torch::Tensor logits = model(tokens);
  const torch::Tensor loss = torch::nn::functional::cross_entropy(logits.flatten(0, 1), tokens.flatten());
  const double forward = bench::now();
  loss.backward();
  const double backward = bench::now();
  optimizer.step();
  optimizer.zero_grad();
  const double end = bench::now();
  if (times == nullptr) return;
  times->forward.push_back(forward - start);
  times->backward.push_back(backward - forward);
  times->optimizer.push_back(end - backward);
  times->step.push_back(end - start);
}

Json in_ms(const Times& times) {
  return {{"forward", 1e3 * bench::median(times.forward)},
          {"backward", 1e3 * bench::median(times.backward)},
          {"optimizer", 1e3 * bench::median(times.optimizer)},
          {"step", 1e3 * bench::median(times.step)}};
}

Json counts_of(const fsdp2::ProcessGroup& group) {
  Json result = Json::object();
  for (const auto& [operation, count] : fsdp2::fake_counts(group)) {
    if (count.calls > 0) result[operation] = {{"calls", count.calls}, {"bytes", count.bytes}};
  }
  return result;
}

/// Elements that all `ranks` together hold of parameters cut on dim 0, each part as long as the longest.
int64_t padded_elements(torch::nn::Module& module, bool recurse, int64_t ranks) {
  int64_t elements = 0;
  for (const torch::Tensor& param : module.parameters(recurse)) {
    const int64_t rows = param.size(0);
    elements += (rows + ranks - 1) / ranks * ranks * (param.numel() / rows);
  }
  return elements;
}

/// From the shapes alone: every block is gathered for forward and for backward, the rest once.
Json expected(llama::Llama& model, const Options& options, int64_t ranks, int64_t bytes_whole, int64_t bytes_reduced) {
  int64_t blocks = 0;
  for (llama::Block block : model->blocks()) blocks += padded_elements(*block, true, ranks);
  const int64_t root = padded_elements(*model, true, ranks) - blocks;
  const int64_t layers = options.model.layers, passes = options.keep ? 1 : 2;
  const auto entry = [](int64_t calls, int64_t bytes) { return Json{{"calls", calls}, {"bytes", bytes}}; };
  Json result{{"shard",
               {{"all_gather", entry(1 + passes * layers, bytes_whole * (root + passes * blocks))},
                {"reduce_scatter", entry(1 + layers, bytes_reduced * (root + blocks))}}}};
  if (options.replicas > 1) {
    result["replicate"] = {{"all_reduce", entry(1 + layers, bytes_reduced * (root + blocks) / ranks)}};
  }
  return result;
}

void run(const Options& options) {
  bench::limit_threads();
  fsdp2::init_process_group({.backend = "fake", .rank = options.rank, .world_size = options.world, .local_rank = 0});
  const int64_t ranks = options.world / options.replicas;
  const fsdp2::DeviceMesh mesh =
      options.replicas > 1 ? fsdp2::init_device_mesh(c10::kCPU, {options.replicas, ranks}, {"replicate", "shard"})
                           : fsdp2::init_device_mesh(c10::kCPU, {ranks}, {"shard"});

  llama::Llama plain = meta_model(options), model = meta_model(options);
  const bool bf16 = options.param_dtype == "bf16";
  fsdp2::FullyShardOptions sharding{.mesh = mesh};
  if (bf16) sharding.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  if (options.keep) sharding.reshard_after_forward = false;
  const Json expected_counts = expected(model, options, ranks, bf16 ? 2 : 4, 4);
  const double before_sharding = bench::now();
  llama::shard(model, sharding);
  const double sharded = bench::now();
  if (bf16) plain->to(torch::kBFloat16);

  const torch::Tensor tokens =
      torch::empty({options.batch, options.seq}, torch::TensorOptions(torch::kLong).device(torch::kMeta));
  torch::optim::AdamW plain_optimizer(plain->parameters()), optimizer(model->parameters());
  step(plain, plain_optimizer, tokens, nullptr);
  const double before_first = bench::now();
  step(model, optimizer, tokens, nullptr);  // also checks once that all ranks agree
  const double first = bench::now() - before_first;
  Times plain_times, times;
  Json counts;
  int64_t unsharded_peak = 0;
  for (int i = 0; i < options.steps; ++i) {
    step(plain, plain_optimizer, tokens, &plain_times);
    fsdp2::reset_fake_counts(mesh.get_group("shard"));
    if (options.replicas > 1) fsdp2::reset_fake_counts(mesh.get_group("replicate"));
    fsdp2::reset_counters();
    step(model, optimizer, tokens, &times);
    counts = {{"shard", counts_of(mesh.get_group("shard"))}};
    if (options.replicas > 1) counts["replicate"] = counts_of(mesh.get_group("replicate"));
    unsharded_peak = fsdp2::counters().unsharded_bytes_peak;
  }

  const double host = bench::median(times.forward) + bench::median(times.backward);
  const double plain_host = bench::median(plain_times.forward) + bench::median(plain_times.backward);
  const auto wrapped = static_cast<double>(options.model.layers + 1);
  bench::print_line(bench::rounded(Json{
      {"bench", "scaling"},
      {"world", options.world},
      {"replicas", options.replicas},
      {"parameters", fsdp2::num_parameters(plain)},
      {"param_dtype", options.param_dtype},
      {"seq", options.seq},
      {"batch", options.batch},
      {"steps", options.steps},
      {"ms", in_ms(times)},
      {"plain_ms", in_ms(plain_times)},
      {"added_forward_backward_ms", 1e3 * (host - plain_host)},
      {"added_us_per_wrapped_module", 1e6 * (host - plain_host) / wrapped},
      {"fully_shard_ms", 1e3 * (sharded - before_sharding)},
      {"first_step_ms", 1e3 * first},
      {"counts", counts},
      {"expected", expected_counts},
      {"counts_as_expected", counts == expected_counts},
      {"unsharded_peak_mib", static_cast<double>(unsharded_peak) / (1 << 20)},
      {"process_peak_mib", bench::memory().peak_resident},
  }));
  FSDP2_CHECK(counts == expected_counts, kUsage, "[bench] one step sent ", counts.dump(), "; the shapes say ",
              expected_counts.dump());
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Host time, calls and bytes of one rank of a large job");
  app.add_option("--world", options.world, "ranks of the job")->check(CLI::PositiveNumber);
  app.add_option("--rank", options.rank, "which of them this is")->check(CLI::NonNegativeNumber);
  app.add_option("--replicas", options.replicas, "HSDP: copies of the model; divides --world")
      ->check(CLI::PositiveNumber);
  app.add_option("--steps", options.steps, "that are timed")->check(CLI::PositiveNumber);
  app.add_option("--seq", options.seq, "tokens of a sequence");
  app.add_option("--batch", options.batch, "sequences of a rank");
  app.add_option("--dim", options.model.dim);
  app.add_option("--layers", options.model.layers);
  app.add_option("--heads", options.model.heads);
  app.add_option("--kv-heads", options.model.kv_heads);
  app.add_option("--ffn", options.model.ffn);
  app.add_option("--vocab", options.model.vocab);
  app.add_option("--param-dtype", options.param_dtype, "of forward and backward")
      ->check(CLI::IsMember({"bf16", "fp32"}));
  app.add_flag("--keep", options.keep, "reshard_after_forward = false");
  return bench::run_main(app, argc, argv, [&] { run(options); });
}
