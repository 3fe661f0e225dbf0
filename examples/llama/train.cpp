// Trains the Llama-style decoder on any text, with checkpoints that resume on any number of
// processes.
//
//   fsdp2 run --nproc-per-node 2 llama_train --text FOLDER --steps 200 --save-at 100 --checkpoint CHECKPOINT
//   fsdp2 run --nproc-per-node 4 llama_train --text FOLDER --steps 200 --resume CHECKPOINT

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <cmath>
#include <iostream>
#include <numbers>

#include "data.h"
#include "model.h"
#include "progress.h"
#include "sample.h"

namespace {

struct Options {
  llama::Config model{.dim = 256, .layers = 8, .heads = 8, .kv_heads = 4, .ffn = 704};
  std::string text, checkpoint, resume, log, sample_file;
  int64_t max_text_mib = 64, seq = 128, global_batch = 8, steps = 200, decay_steps = 0, warmup_steps = 20;
  int64_t save_at = 0, print_every = 10, sample_bytes = 0;
  double learning_rate = 2e-3, clip = 1.0, temperature = 0.7;
  uint64_t seed = 1;
  std::string prompt = "#include <";
  bool bf16 = false;
};

void add_flags(CLI::App& app, Options& o) {
  app.option_defaults()->always_capture_default();
  app.add_option("--text", o.text, "file, or folder of files, to learn from")->required();
  app.add_option("--max-text-mib", o.max_text_mib, "read at most this much of it");
  app.add_option("--dim", o.model.dim, "width of the model");
  app.add_option("--layers", o.model.layers, "number of blocks");
  app.add_option("--heads", o.model.heads, "query heads");
  app.add_option("--kv-heads", o.model.kv_heads, "key and value heads");
  app.add_option("--ffn", o.model.ffn, "width inside the feed-forward part");
  app.add_option("--seq", o.seq, "tokens (bytes) of a sequence");
  app.add_option("--batch", o.global_batch, "sequences of a step, over all processes together");
  app.add_option("--steps", o.steps, "train up to this step");
  app.add_option("--decay-steps", o.decay_steps, "where the learning rate has fallen to a tenth; 0: --steps");
  app.add_option("--warmup-steps", o.warmup_steps, "steps over which the learning rate rises");
  app.add_option("--lr", o.learning_rate, "highest learning rate");
  app.add_option("--clip", o.clip, "largest gradient norm");
  app.add_option("--seed", o.seed, "of the weights and of the order of the data");
  app.add_flag("--bf16", o.bf16, "bf16 parameters in forward and backward, fp32 reduction");
  app.add_option("--save-at", o.save_at, "save a checkpoint after this step; 0: never");
  app.add_option("--checkpoint", o.checkpoint, "folder of the checkpoint to write");
  app.add_option("--resume", o.resume, "folder of the checkpoint to go on from");
  app.add_option("--log", o.log, "file for the losses and events, one JSON object a line");
  app.add_option("--print-every", o.print_every, "steps between two lines where there is no terminal");
  app.add_option("--sample", o.sample_bytes, "bytes of text to write with the trained model");
  app.add_option("--sample-file", o.sample_file, "file for that text; default: standard output");
  app.add_option("--prompt", o.prompt, "what the text begins with");
  app.add_option("--temperature", o.temperature, "below 1: less variety");
}

void check(const Options& o, int world_size) {
  FSDP2_CHECK(o.global_batch % world_size == 0, kInvalidArgument, "[train] --batch ", o.global_batch,
              " does not divide by the ", world_size, " processes; choose a multiple");
  FSDP2_CHECK(o.model.dim % o.model.heads == 0 && o.model.dim / o.model.heads % 2 == 0, kInvalidArgument,
              "[train] --dim ", o.model.dim, " over --heads ", o.model.heads, " must be an even number");
  FSDP2_CHECK(o.model.heads % o.model.kv_heads == 0, kInvalidArgument, "[train] --heads ", o.model.heads,
              " must be a multiple of --kv-heads ", o.model.kv_heads);
  FSDP2_CHECK(o.save_at == 0 || !o.checkpoint.empty(), kInvalidArgument,
              "[train] --save-at needs --checkpoint, the folder to write");
}

/// Rises over the warm-up, then falls along a cosine to a tenth. Depends on the step alone.
double learning_rate(const Options& o, int64_t step) {
  if (step <= o.warmup_steps) return o.learning_rate * static_cast<double>(step) / static_cast<double>(o.warmup_steps);
  auto end = o.decay_steps > 0 ? o.decay_steps : o.steps;
  double part = std::min(1.0, static_cast<double>(step - o.warmup_steps) / std::max<double>(end - o.warmup_steps, 1));
  return o.learning_rate * (0.55 + 0.45 * std::cos(std::numbers::pi * part));
}

llama::Llama build_model(const Options& o) {
  llama::Llama model = nullptr;
  {
    fsdp2::MetaDeviceGuard meta;  // shapes only: no process ever holds the whole model
    model = llama::Llama(o.model);
  }
  fsdp2::FullyShardOptions options;
  if (o.bf16) options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat32};
  llama::shard(model, options);
  fsdp2::to_empty(model, fsdp2::local_device());
  if (o.resume.empty()) {
    torch::manual_seed(o.seed);  // the same on every process: sharded fills give the unsharded values
    fsdp2::reset_parameters(model);
  }
  return model;
}

fsdp2::dcp::StateDict make_state(llama::Llama& model, torch::optim::Optimizer& optimizer, int64_t step) {
  fsdp2::dcp::StateDict state;
  state["model"] = fsdp2::get_model_state_dict(model);
  state["optim"] = fsdp2::get_optimizer_state_dict(model, optimizer);
  state["step"] = step;
  return state;
}

int64_t load(llama::Llama& model, torch::optim::Optimizer& optimizer, const std::string& folder) {
  auto state = make_state(model, optimizer, 0);
  fsdp2::dcp::load(state, folder);
  fsdp2::set_model_state_dict(model, state["model"].dict());
  fsdp2::set_optimizer_state_dict(model, optimizer, state["optim"].dict());
  return state["step"].integer();
}

void train(const Options& o) {
  fsdp2::init_process_group();
  const int rank = fsdp2::get_rank(), world_size = fsdp2::get_world_size();
  check(o, world_size);
  llama::Text text(o.text, o.max_text_mib << 20);
  auto model = build_model(o);
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions(o.learning_rate).betas({0.9, 0.95}).weight_decay(0.1));
  const int64_t first_step = o.resume.empty() ? 1 : load(model, optimizer, o.resume) + 1;

  llama::Progress progress(rank == 0, o.log, first_step, o.steps, o.print_every);
  const auto num_parameters = fsdp2::num_parameters(model);
  int64_t num_local = 0;
  for (const auto& parameter : model->parameters()) num_local += fsdp2::DTensor(parameter).to_local().numel();
  progress.event(c10::str("llama: ", num_parameters, " parameters over ", world_size, " processes (", num_local,
                          " here); text: ", text.num_files(), " files, ", text.size(), " bytes",
                          o.resume.empty() ? "" : c10::str("; resumed after step ", first_step - 1)),
                 {{"event", "start"},
                  {"world_size", world_size},
                  {"parameters", num_parameters},
                  {"local_parameters", num_local},
                  {"files", text.num_files()},
                  {"bytes", text.size()},
                  {"resumed_after", first_step - 1}});

  const int64_t rows = o.global_batch / world_size;
  for (int64_t step = first_step; step <= o.steps; ++step) {
    auto [inputs, targets] = text.batch(o.seed, step, o.global_batch, rank * rows, rows, o.seq);
    auto logits = model(inputs.to(fsdp2::local_device()));
    auto loss = torch::nn::functional::cross_entropy(logits.to(torch::kFloat32).flatten(0, 1),
                                                     targets.to(fsdp2::local_device()).flatten());
    loss.backward();
    auto norm = fsdp2::clip_grad_norm_(model->parameters(), o.clip);
    for (auto& group : optimizer.param_groups()) group.options().set_lr(learning_rate(o, step));
    optimizer.step();
    optimizer.zero_grad();

    auto mean = loss.detach().to(torch::kFloat64) / world_size;
    fsdp2::all_reduce(mean);
    progress.step(step, mean.item<double>(), norm.item<double>(), o.global_batch * o.seq);

    if (step == o.save_at) {
      fsdp2::dcp::save(make_state(model, optimizer, step), o.checkpoint);
      auto pids = fsdp2::all_gather_strings(std::to_string(getpid()));
      progress.event(c10::str("saved ", o.checkpoint, " after step ", step),
                     {{"event", "saved"}, {"step", step}, {"folder", o.checkpoint}, {"pids", pids}});
    }
  }

  if (o.sample_bytes > 0) {
    auto sharded = fsdp2::fsdp_module(model);
    sharded.set_reshard_after_forward(false);  // one gather for all bytes
    auto written = llama::sample(model, o.prompt, o.sample_bytes, o.seq, o.temperature, o.seed);
    sharded.reshard();
    if (rank == 0 && o.sample_file.empty()) std::cout << written << std::endl;
    if (rank == 0 && !o.sample_file.empty()) std::ofstream(o.sample_file) << written << '\n';
  }
  progress.event(c10::str("done; at most ", static_cast<int64_t>(llama::peak_resident_mib()), " MiB resident"),
                 {{"event", "done"}, {"peak_resident_mib", llama::peak_resident_mib()}});
  fsdp2::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app(
      "Trains a small Llama-style model on the bytes of a text, over the processes that `fsdp2 "
      "run` starts.");
  add_flags(app, options);
  CLI11_PARSE(app, argc, argv);
  try {
    train(options);
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << std::endl;
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
}
