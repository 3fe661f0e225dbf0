// Does after.cpp train as before.cpp does?   fsdp2 run --nproc-per-node 2 retrofit_two_tower_parity
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
  const auto loss = [](auto& model, const fsdp2::ParityBatch& batch) {
    return after::contrastive_loss(model(batch[0], batch[1]));
  };
  const auto make_plain = [&] {
    before::TwoTower model;
    model->temperature.set_data(model->temperature.reshape({1}));
    model->to(torch::kDouble);
    model->eval();  // no dropout
    return fsdp2::parity_side(model, torch::optim::AdamW(model->parameters(), 3e-3), loss);
  };
  const auto make_sharded = [&] {
    after::TwoTower model;
    model->to(torch::kDouble);
    model->eval();
    fsdp2::fully_shard({model->user_tower, model->item_tower});
    fsdp2::fully_shard(model);
    return fsdp2::parity_side(model, torch::optim::AdamW(model->parameters(), 3e-3), loss);
  };
  auto [users, items] = after::Pairs(11).next(12);
  const std::vector<fsdp2::ParityBatch> batches{{users, items}};
  const auto parity =
      fsdp2::check_parity(make_plain, make_sharded, batches, /*steps=*/4, /*tolerance=*/1e-9, {.split_batch = false});
  const bool ok = report("two_tower, every rank the whole batch", parity);
  fsdp2::destroy_process_group();
  return ok ? 0 : 1;
} catch (const c10::Error& error) {
  std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  return 1;
}
