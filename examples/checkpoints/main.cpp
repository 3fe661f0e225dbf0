#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

using Layer = fsdp2::Hooked<torch::nn::Linear>;
struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return down(dropout(torch::relu(up(x)))); }
  Layer up = register_module("up", Layer(16, 64)), down = register_module("down", Layer(64, 1));
  torch::nn::Dropout dropout = register_module("dropout", torch::nn::Dropout(0.1));
};
FSDP2_MODULE(Net);

int main(int argc, char** argv) {  // checkpoints FOLDER STEPS
  const std::string folder = argc > 1 ? argv[1] : "run";
  const int64_t steps = argc > 2 ? std::stoll(argv[2]) : 20;
  fsdp2::init_process_group();
  torch::manual_seed(0);
  Net net;
  fsdp2::fully_shard(net);
  torch::manual_seed(fsdp2::get_rank());  // every rank drops something else
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);
  auto scheduler = std::make_shared<fsdp2::LRScheduler>(optimizer, fsdp2::lr_schedule::warmup_cosine(5, 40));
  auto cursor = std::make_shared<fsdp2::SampleCursor>(fsdp2::SampleCursorOptions{.size = 500, .global_batch = 32});
  auto rng = std::make_shared<fsdp2::RngState>();

  auto state = [&] {  // shares its tensors with model and optimizer
    return fsdp2::dcp::StateDict{{"model", fsdp2::get_model_state_dict(net)},
                                 {"optim", fsdp2::get_optimizer_state_dict(net, optimizer)},
                                 {"lr", scheduler},
                                 {"data", cursor},
                                 {"rng", fsdp2::dcp::per_rank(rng)}};
  };
  fsdp2::dcp::CheckpointManager manager(
      folder, {.keep_last = 2, .async = true, .load = {.allow_missing = {"rng.*"}}});  // more ranks than before
  int64_t step = 0;
  auto target = state();
  if (auto resumed = manager.load_latest(target); resumed.checkpoint) {
    fsdp2::set_state_dict(net, optimizer, target["model"].dict(), target["optim"].dict());
    step = resumed.checkpoint->step;
  }
  while (++step <= steps) {
    auto samples = torch::tensor(cursor->next()).to(torch::kFloat).unsqueeze(1);  // this rank's rows of the batch
    auto x = torch::sin(samples * torch::arange(1, 17));
    auto loss = torch::mse_loss(net(x.to(fsdp2::local_device())), x.pow(2).mean(1, true).to(fsdp2::local_device()));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    scheduler->step();
    auto mean = loss.detach() / fsdp2::get_world_size();
    fsdp2::all_reduce(mean);
    if (fsdp2::get_rank() == 0)
      std::cout << "step " << step << " loss " << std::setprecision(9) << mean.item<float>() << '\n';
    if (step % 5 == 0) manager.save(step, state());
  }
  manager.wait();
  fsdp2::destroy_process_group();
}
