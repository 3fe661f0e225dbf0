#pragma once

// Small models that the fully_shard tests share.

#include <torch/torch.h>

#include <fsdp2/fsdp2.h>

#include <string>
#include <vector>

namespace fsdp2::testing {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t dim) {
    up = register_module("up", torch::nn::Linear(dim, 2 * dim + 1));  // an odd number of rows: uneven shards
    down = register_module("down", torch::nn::Linear(2 * dim + 1, dim));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  void reset_parameters() {}
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
FSDP2_MODULE(Block);

/// Token ids in, logits out.
struct NetImpl : torch::nn::Module {
  static constexpr int64_t kVocab = 11;
  explicit NetImpl(int64_t layers = 3, int64_t dim = 6) {
    embed = register_module("embed", torch::nn::Embedding(kVocab, dim));
    for (int64_t i = 0; i < layers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block(dim)));
    }
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(dim, kVocab).bias(false)));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    torch::Tensor x = embed(tokens);
    for (Block& block : blocks) x = block(x);
    return head(x);
  }
  void reset_parameters() {}
  torch::nn::Embedding embed{nullptr};
  std::vector<Block> blocks;
  torch::nn::Linear head{nullptr};
};
FSDP2_MODULE(Net);

inline Net shard(Net net, const FullyShardOptions& options = {}) {
  for (Block& block : net->blocks) fully_shard(block, options);
  fully_shard(net, options);
  return net;
}

inline torch::Tensor loss_of(Net& net, const torch::Tensor& tokens) {
  return torch::nn::functional::cross_entropy(net(tokens).flatten(0, 1).to(torch::kFloat), tokens.flatten());
}

/// One Linear whose calls run hooks: out = x W^T.
using Linear = Hooked<torch::nn::Linear>;
inline Linear linear(int64_t in, int64_t out, bool bias = false) {
  return Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

}  // namespace fsdp2::testing
