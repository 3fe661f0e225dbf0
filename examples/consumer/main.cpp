// A program outside the library's tree: everything it needs comes from find_package(fsdp2).

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <iostream>

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    up = register_module("up", torch::nn::Linear(8, 32));
    down = register_module("down", torch::nn::Linear(32, 8));
  }
  torch::Tensor forward(const torch::Tensor& x) { return down(torch::gelu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
FSDP2_MODULE(Mlp);

int main() {
  try {
    fsdp2::init_process_group();
    torch::manual_seed(0);
    Mlp model;
    fsdp2::fully_shard(model);
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));

    const torch::Tensor input = torch::randn({16, 8});
    double first = 0, last = 0;
    for (int step = 0; step < 10; ++step) {
      const torch::Tensor loss = torch::mse_loss(model(input), input);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      last = loss.item<double>();
      if (step == 0) first = last;
    }
    if (fsdp2::get_rank() == 0) {
      std::cout << "ranks: " << fsdp2::get_world_size() << ", loss fell: " << std::boolalpha << (last < first) << '\n';
    }
    fsdp2::destroy_process_group();
  } catch (const fsdp2::Error& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
