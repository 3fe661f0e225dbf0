#include "model.h"

namespace llama {
namespace {

torch::nn::Linear linear(int64_t in, int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

}  // namespace

RMSNormImpl::RMSNormImpl(const Config& config) : epsilon_(config.norm_epsilon) {
  weight_ = register_parameter("weight", torch::empty({config.dim}));
  reset_parameters();
}

void RMSNormImpl::reset_parameters() { torch::nn::init::ones_(weight_); }

torch::Tensor RMSNormImpl::forward(const torch::Tensor& x) { return at::rms_norm(x, {x.size(-1)}, weight_, epsilon_); }

AttentionImpl::AttentionImpl(const Config& config)
    : heads_(config.heads),
      kv_heads_(config.kv_heads),
      head_dim_(config.dim / config.heads),
      theta_(config.rope_theta) {
  wq_ = register_module("wq", linear(config.dim, heads_ * head_dim_));
  wk_ = register_module("wk", linear(config.dim, kv_heads_ * head_dim_));
  wv_ = register_module("wv", linear(config.dim, kv_heads_ * head_dim_));
  wo_ = register_module("wo", linear(heads_ * head_dim_, config.dim));
}

void AttentionImpl::grow_tables(int64_t length) {
  torch::NoGradGuard no_grad;
  auto channel = torch::arange(0, head_dim_, 2, torch::kFloat32);
  auto frequency = 1.0 / torch::pow(theta_, channel / static_cast<double>(head_dim_));
  auto angle = torch::outer(torch::arange(length, torch::kFloat32), frequency);
  angle = torch::cat({angle, angle}, -1);
  cos_ = angle.cos();
  sin_ = angle.sin();
}

torch::Tensor AttentionImpl::rotate(const torch::Tensor& x) const {  // (batch, heads, time, head_dim)
  auto length = x.size(2);
  auto half = x.chunk(2, -1);
  auto turned = torch::cat({-half[1], half[0]}, -1);
  return x * cos_.narrow(0, 0, length).to(x.options()) + turned * sin_.narrow(0, 0, length).to(x.options());
}

torch::Tensor AttentionImpl::forward(const torch::Tensor& x) {
  auto batch = x.size(0), length = x.size(1);
  if (!cos_.defined() || cos_.size(0) < length) grow_tables(length);
  auto q = wq_(x).view({batch, length, heads_, head_dim_}).transpose(1, 2);
  auto k = wk_(x).view({batch, length, kv_heads_, head_dim_}).transpose(1, 2);
  auto v = wv_(x).view({batch, length, kv_heads_, head_dim_}).transpose(1, 2);
  auto out = at::scaled_dot_product_attention(rotate(q), rotate(k), v, /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                              /*is_causal=*/true, /*scale=*/std::nullopt,
                                              /*enable_gqa=*/kv_heads_ != heads_);
  return wo_(out.transpose(1, 2).reshape({batch, length, heads_ * head_dim_}));
}

FeedForwardImpl::FeedForwardImpl(const Config& config) {
  w1_ = register_module("w1", linear(config.dim, config.ffn));
  w2_ = register_module("w2", linear(config.ffn, config.dim));
  w3_ = register_module("w3", linear(config.dim, config.ffn));
}

torch::Tensor FeedForwardImpl::forward(const torch::Tensor& x) { return w2_(torch::silu(w1_(x)) * w3_(x)); }

BlockImpl::BlockImpl(const Config& config) {
  attention_ = register_module("attention", Attention(config));
  feed_forward_ = register_module("feed_forward", FeedForward(config));
  attention_norm_ = register_module("attention_norm", RMSNorm(config));
  ffn_norm_ = register_module("ffn_norm", RMSNorm(config));
}

torch::Tensor BlockImpl::forward(const torch::Tensor& x) {
  auto h = x + attention_(attention_norm_(x));
  return h + feed_forward_(ffn_norm_(h));
}

LlamaImpl::LlamaImpl(const Config& config) {
  tok_embeddings_ = register_module("tok_embeddings", torch::nn::Embedding(config.vocab, config.dim));
  layers_ = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks_.emplace_back(config);
    layers_->push_back(blocks_.back());
  }
  norm_ = register_module("norm", RMSNorm(config));
  output_ = register_module("output", linear(config.dim, config.vocab));
}

torch::Tensor LlamaImpl::forward(const torch::Tensor& tokens) {
  auto x = tok_embeddings_(tokens);
  for (auto& block : blocks_) x = block(x);
  return output_(norm_(x));
}

fsdp2::FSDPModule shard(Llama& model, const fsdp2::FullyShardOptions& options) {
  for (const auto& block : model->blocks()) fsdp2::fully_shard(block, options);
  return fsdp2::fully_shard(model, options);
}

}  // namespace llama
