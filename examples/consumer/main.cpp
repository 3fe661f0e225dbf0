// A program outside the library's tree: everything it needs comes from find_package(fsdp2).

#include <fsdp2/device_mesh.h>
#include <fsdp2/error.h>
#include <fsdp2/process_group.h>

#include <torch/torch.h>

#include <cstdlib>
#include <iostream>

int main() {
  try {
    // Alone unless a launcher says otherwise.
    fsdp2::ProcessGroupOptions options;
    if (std::getenv("RANK") == nullptr) {
      options = {.init_method = "tcp://127.0.0.1:29511", .rank = 0, .world_size = 1};
    }
    fsdp2::init_process_group(options);
    const auto mesh = fsdp2::init_device_mesh(torch::kCPU, {fsdp2::get_world_size()}, {"shard"});

    torch::Tensor value = torch::ones({4});
    fsdp2::all_reduce(value, fsdp2::ReduceOp::SUM, mesh.get_group("shard"));
    if (fsdp2::get_rank() == 0) {
      std::cout << "ranks: " << mesh.size() << ", sum: " << value.sum().item<float>() << '\n';
    }
    fsdp2::destroy_process_group();
  } catch (const fsdp2::Error& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
