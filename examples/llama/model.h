#pragma once

// A Llama-style decoder. Nothing here knows about processes or sharding, except that modules are
// declared with FSDP2_MODULE, so that calling them runs the hooks of whoever sharded them.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

namespace llama {

struct Config {
  int64_t dim = 256, layers = 4, heads = 8, kv_heads = 4, ffn = 704, vocab = 256;
  double norm_epsilon = 1e-5, rope_theta = 10000.0;
};

/// x / rms(x) * weight over the last dim.
class RMSNormImpl : public torch::nn::Module {
 public:
  explicit RMSNormImpl(const Config& config);
  void reset_parameters();
  torch::Tensor forward(const torch::Tensor& x);

 private:
  double epsilon_;
  torch::Tensor weight_;
};
FSDP2_MODULE(RMSNorm);

/// Causal self-attention; `heads / kv_heads` query heads share one key and value head.
class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const Config& config);
  torch::Tensor forward(const torch::Tensor& x);  // (batch, time, dim) -> the same

 private:
  /// Turns pairs of channels by an angle that grows with the position ("rotate half").
  torch::Tensor rotate(const torch::Tensor& x) const;
  void grow_tables(int64_t length);

  int64_t heads_, kv_heads_, head_dim_;
  double theta_;
  torch::nn::Linear wq_{nullptr}, wk_{nullptr}, wv_{nullptr}, wo_{nullptr};
  torch::Tensor cos_, sin_;  // (time, head_dim), made at the first call: not parameters, not saved
};
FSDP2_MODULE(Attention);

/// SwiGLU: w2(silu(w1 x) * w3 x).
class FeedForwardImpl : public torch::nn::Module {
 public:
  explicit FeedForwardImpl(const Config& config);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  torch::nn::Linear w1_{nullptr}, w2_{nullptr}, w3_{nullptr};
};
FSDP2_MODULE(FeedForward);

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const Config& config);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  Attention attention_{nullptr};
  FeedForward feed_forward_{nullptr};
  RMSNorm attention_norm_{nullptr}, ffn_norm_{nullptr};
};
FSDP2_MODULE(Block);

class LlamaImpl : public torch::nn::Module {
 public:
  explicit LlamaImpl(const Config& config);
  torch::Tensor forward(const torch::Tensor& tokens);  // int64 (batch, time) -> (batch, time, vocab)
  /// The blocks, in order: what one shards before the whole.
  const std::vector<Block>& blocks() const { return blocks_; }

 private:
  torch::nn::Embedding tok_embeddings_{nullptr};
  torch::nn::ModuleList layers_{nullptr};
  std::vector<Block> blocks_;  // the children of layers_, with their type
  RMSNorm norm_{nullptr};
  torch::nn::Linear output_{nullptr};
};
FSDP2_MODULE(Llama);

/// fully_shard on each block, then on the whole.
fsdp2::FSDPModule shard(Llama& model, const fsdp2::FullyShardOptions& options = {});

}  // namespace llama
