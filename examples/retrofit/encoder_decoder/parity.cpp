// Does after.cpp train as before.cpp does?   fsdp2 run --nproc-per-node 2 retrofit_encoder_decoder_parity
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
    auto target = batch[0].flip(1);
    auto shifted = torch::cat({torch::zeros_like(target.slice(1, 0, 1)), target.slice(1, 0, after::kLength - 1)}, 1);
    return torch::cross_entropy_loss(model(batch[0], shifted).view({-1, after::kVocabulary}), target.reshape(-1));
  };
  const auto make_plain = [&] {
    before::Seq2Seq model;
    model->to(torch::kDouble);
    return fsdp2::parity_side(model, torch::optim::Adam(model->parameters(), 2e-3), loss);
  };
  const auto make_sharded = [&] {
    after::Seq2Seq model;
    model->to(torch::kDouble);
    for (const auto& layer : *model->encoder) fsdp2::fully_shard(layer);
    for (const auto& layer : *model->decoder) fsdp2::fully_shard(layer);
    fsdp2::fully_shard(model);
    return fsdp2::parity_side(model, torch::optim::Adam(model->parameters(), 2e-3), loss);
  };
  torch::manual_seed(1);
  const std::vector<fsdp2::ParityBatch> batches{
      {torch::randint(1, after::kVocabulary, {12, after::kLength}, torch::kLong)}};
  const bool ok = report("encoder_decoder", fsdp2::check_parity(make_plain, make_sharded, batches, /*steps=*/4, 1e-9));
  fsdp2::destroy_process_group();
  return ok ? 0 : 1;
} catch (const c10::Error& error) {
  std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  return 1;
}
