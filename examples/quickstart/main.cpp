#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

using Layer = fsdp2::Hooked<torch::nn::Linear>;  // or, for types of your own, FSDP2_MODULE in place of TORCH_MODULE
struct NetImpl : torch::nn::Module {
  NetImpl() { for (auto name : {"a", "b", "c"}) layers.push_back(register_module(name, Layer(256, 256))); }
  torch::Tensor forward(torch::Tensor x) { for (auto& layer : layers) x = x + torch::relu(layer(x)); return x; }
  std::vector<Layer> layers;
};
FSDP2_MODULE(Net);

int main() {
  fsdp2::init_process_group();                                // RANK, WORLD_SIZE, ... from `fsdp2 run`
  Net net = nullptr;
  { fsdp2::MetaDeviceGuard meta; net = Net(); }               // shapes only, no memory
  for (auto& layer : net->layers) fsdp2::fully_shard(layer);  // blocks first,
  fsdp2::fully_shard(net);                                    // the root last
  fsdp2::to_empty(net, fsdp2::local_device());                // memory for this rank's shards
  torch::manual_seed(0);                                      // one seed on all ranks
  fsdp2::reset_parameters(net);                               // the values of the unsharded model
  torch::optim::AdamW optimizer(net->parameters(), 1e-3);     // a stock optimizer, on the shards
  torch::manual_seed(fsdp2::get_rank());                      // data differs by rank
  for (int step = 0; step < 10; ++step) {
    auto loss = net(torch::randn({32, 256}, fsdp2::local_device())).pow(2).mean();  // net(x), not net->forward(x)
    loss.backward();                                          // gradients are averaged over the ranks
    fsdp2::clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    if (fsdp2::get_rank() == 0) std::cout << "step " << step << " loss " << loss.item<float>() << '\n';
  }
  fsdp2::destroy_process_group();
}
