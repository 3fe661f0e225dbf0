// Does after.cpp train as before.cpp does?   fsdp2 run --nproc-per-node 2 retrofit_classifier_parity
#include "../parity.h"

#define main program_main
namespace before {
#include "before.cpp"
}
namespace after {
#include "after.cpp"
}
#undef main

int main() try {
  fsdp2::init_process_group();
  const auto parity = [&](bool train) {
    const auto loss = [](auto& model, const fsdp2::ParityBatch& batch) {
      return torch::nn::functional::cross_entropy(model(batch[0]), batch[1]);
    };
    const auto sgd = torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-4);
    const auto make_plain = [&] {
      before::Classifier model(16, 6);
      model->to(torch::kDouble);
      model->train(train);
      return fsdp2::parity_side(model, torch::optim::SGD(model->parameters(), sgd), loss);
    };
    const auto make_sharded = [&] {
      after::Classifier model(16, 6);
      model->to(torch::kDouble);
      model->train(train);
      fsdp2::fully_shard({model->layers[0], model->layers[1]});
      fsdp2::fully_shard(model->layers[2]);
      fsdp2::fully_shard(model);
      return fsdp2::parity_side(model, torch::optim::SGD(model->parameters(), sgd), loss);
    };
    torch::manual_seed(1);
    const std::vector<fsdp2::ParityBatch> batches{
        {torch::randn({12, 3, 16, 16}, torch::kDouble), torch::randint(0, 6, {12}, torch::kLong)}};
    return fsdp2::check_parity(make_plain, make_sharded, batches, /*steps=*/4, /*tolerance=*/1e-9,
                               {.split_batch = !train});
  };
  bool ok = report("batch norm in eval mode, each rank its rows", parity(false));
  ok &= report("batch norm in train mode, every rank the whole batch", parity(true));
  fsdp2::destroy_process_group();
  return ok ? 0 : 1;
} catch (const c10::Error& error) {
  std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  return 1;
}
