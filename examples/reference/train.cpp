// The smallest complete training program: copy it, then replace Net, next_batch() and the numbers.
//
//   fsdp2 run --nproc-per-node 2 ./reference_train            # 20 steps, saves after step 10
//   fsdp2 run --nproc-per-node 4 ./reference_train --resume   # goes on from there on 4 processes
//
// Every process ("rank") runs this same program. Calls that say "collective" must be made by all
// ranks, in the same order.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <iostream>
#include <string>

// FSDP2_MODULE stands where TORCH_MODULE would: calling net(x) then gathers the weights before
// forward() and drops them after it. Always call net(x), never net->forward(x).
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t dim) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
    up = register_module("up", torch::nn::Linear(dim, 4 * dim));
    down = register_module("down", torch::nn::Linear(4 * dim, dim));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
FSDP2_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t in, int64_t dim, int64_t num_blocks) {
    embed = register_module("embed", torch::nn::Linear(in, dim));
    for (int64_t i = 0; i < num_blocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block(dim)));
    }
    head = register_module("head", torch::nn::Linear(dim, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = embed(x);
    for (auto& block : blocks) h = block(h);
    return head(h);
  }
  torch::nn::Linear embed{nullptr}, head{nullptr};
  std::vector<Block> blocks;
};
FSDP2_MODULE(Net);

constexpr int64_t kInputs = 32, kBatch = 48;  // kBatch: rows of a step over all ranks, which divide it
constexpr int64_t kSteps = 20, kSaveAt = 10;
constexpr const char* kFolder = "reference_checkpoint";

// ----- init_distributed -----------------------------------------------------------------

void init_distributed() {
  // Reads RANK, WORLD_SIZE, MASTER_ADDR, ... that `fsdp2 run` (or torchrun, mpirun, srun) sets.
  // NCCL where there are GPUs, else Gloo. A rank that never comes is an error that names it.
  fsdp2::init_process_group();
}

// ----- build_model_meta -----------------------------------------------------------------

Net build_model_meta() {
  Net net = nullptr;
  {
    fsdp2::MetaDeviceGuard meta;  // shapes without memory: the whole model never exists on one rank
    net = Net(kInputs, 128, 4);
  }
  // Bottom up: each block is gathered and freed on its own; what is left (embed, head) belongs to
  // the root.
  for (auto& block : net->blocks) fsdp2::fully_shard(block);
  fsdp2::fully_shard(net);
  fsdp2::to_empty(net, fsdp2::local_device());  // memory for this rank's shards only
  torch::manual_seed(0);                        // the same seed everywhere: the values of an unsharded model
  fsdp2::reset_parameters(net);
  return net;
}

// ----- build_optimizer ------------------------------------------------------------------

torch::optim::AdamW build_optimizer(Net& net) {
  // A stock optimizer: its state is sharded as the parameters are.
  return torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(1e-3));
}

// ----- train_step -----------------------------------------------------------------------

// This rank's rows of a global batch that depends on the step alone, so any number of ranks sees
// the same data.
std::pair<torch::Tensor, torch::Tensor> next_batch(int64_t step) {
  torch::manual_seed(1000 + step);
  auto x = torch::randn({kBatch, kInputs});
  auto y = x.pow(2).mean(1, /*keepdim=*/true);
  auto rows = kBatch / fsdp2::get_world_size();
  auto mine = [&](const torch::Tensor& t) {
    return t.narrow(0, fsdp2::get_rank() * rows, rows).to(fsdp2::local_device());
  };
  return {mine(x), mine(y)};
}

double train_step(Net& net, torch::optim::Optimizer& optimizer, int64_t step) {
  auto [x, y] = next_batch(step);
  auto loss = torch::mse_loss(net(x), y);
  loss.backward();                                 // collective; gradients are averaged over the ranks
  fsdp2::clip_grad_norm_(net->parameters(), 1.0);  // collective; the norm over all ranks
  optimizer.step();
  optimizer.zero_grad();
  auto mean = loss.detach() / fsdp2::get_world_size();
  fsdp2::all_reduce(mean);  // the loss of the global batch
  return mean.item<double>();
}

// ----- checkpoint_save ------------------------------------------------------------------

fsdp2::dcp::StateDict make_state(Net& net, torch::optim::Optimizer& optimizer, int64_t step) {
  fsdp2::dcp::StateDict state;
  state["model"] = fsdp2::get_model_state_dict(net);
  state["optim"] = fsdp2::get_optimizer_state_dict(net, optimizer);
  state["step"] = step;
  return state;
}

void checkpoint_save(Net& net, torch::optim::Optimizer& optimizer, int64_t step) {
  // Collective: each rank writes its own file. Python's torch.distributed.checkpoint reads the
  // folder too.
  fsdp2::dcp::save(make_state(net, optimizer, step), kFolder, {.overwrite = true});
}

// ----- checkpoint_load ------------------------------------------------------------------

int64_t checkpoint_load(Net& net, torch::optim::Optimizer& optimizer) {
  // Collective, on any number of ranks: each reads the parts that its shards need.
  auto state = make_state(net, optimizer, 0);
  fsdp2::dcp::load(state, kFolder);
  fsdp2::set_model_state_dict(net, state["model"].dict());
  fsdp2::set_optimizer_state_dict(net, optimizer, state["optim"].dict());
  return state["step"].integer();
}

// ----- main -----------------------------------------------------------------------------

int main(int argc, char** argv) try {
  bool resume = argc > 1 && std::string(argv[1]) == "--resume";
  init_distributed();
  auto net = build_model_meta();
  auto optimizer = build_optimizer(net);
  int64_t step = resume ? checkpoint_load(net, optimizer) : 0;
  while (++step <= kSteps) {
    double loss = train_step(net, optimizer, step);
    if (fsdp2::get_rank() == 0) std::cout << "step " << step << " loss " << loss << std::endl;
    if (step == kSaveAt && !resume) checkpoint_save(net, optimizer, step);
  }
  fsdp2::destroy_process_group();
} catch (const c10::Error& error) {
  // The launcher stops the other ranks and shows this line as the root cause.
  std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  return 1;
}
