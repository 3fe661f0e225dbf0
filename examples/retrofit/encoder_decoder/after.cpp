// Teaches a small Transformer, encoder and decoder, to write a sequence of numbers backwards.
//
//   retrofit_encoder_decoder_before --steps 200 --checkpoint reverse.pt --save-every 50
//   retrofit_encoder_decoder_before --steps 400 --checkpoint reverse.pt --resume

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <cmath>
#include <iomanip>
#include <iostream>
#include <string>
#include <vector>

namespace nn = torch::nn;

constexpr int64_t kVocabulary = 24, kStart = 0, kLength = 10, kBatch = 16;
constexpr int64_t kDim = 48, kHeads = 4, kLayers = 2;
constexpr double kPeakRate = 2e-3, kWarmup = 40, kMaxNorm = 1.0;

struct AttentionImpl : nn::Module {
  AttentionImpl(int64_t dim, int64_t num_heads)
      : heads(num_heads), query(dim, dim), key_value(dim, 2 * dim), out(dim, dim) {
    register_module("query", query);
    register_module("key_value", key_value);
    register_module("out", out);
  }
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& memory, bool causal) {
    auto split = [&](const torch::Tensor& t) {
      return t.view({t.size(0), t.size(1), heads, t.size(2) / heads}).transpose(1, 2);
    };
    auto parts = key_value(memory).chunk(2, -1);
    auto q = split(query(x)), k = split(parts[0]), v = split(parts[1]);
    auto scores = q.matmul(k.transpose(-2, -1)) / std::sqrt(static_cast<double>(q.size(-1)));
    if (causal) {
      auto mask =
          torch::ones({x.size(1), memory.size(1)}, torch::TensorOptions(torch::kBool).device(x.device())).triu(1);
      scores = scores.masked_fill(mask, -1e9);
    }
    auto mixed = scores.softmax(-1).matmul(v).transpose(1, 2).contiguous();
    return out(mixed.view({x.size(0), x.size(1), -1}));
  }
  int64_t heads;
  nn::Linear query, key_value, out;
};
TORCH_MODULE(Attention);

struct FeedForwardImpl : nn::Module {
  explicit FeedForwardImpl(int64_t dim) {
    net = register_module("net", nn::Sequential(nn::Linear(dim, 4 * dim), nn::GELU(), nn::Linear(4 * dim, dim)));
  }
  torch::Tensor forward(const torch::Tensor& x) { return net->forward(x); }
  nn::Sequential net{nullptr};
};
TORCH_MODULE(FeedForward);

nn::LayerNorm layer_norm() { return nn::LayerNorm(nn::LayerNormOptions({kDim})); }

struct EncoderLayerImpl : nn::Module {
  EncoderLayerImpl() {
    attention = register_module("attention", Attention(kDim, kHeads));
    feed_forward = register_module("feed_forward", FeedForward(kDim));
    norm1 = register_module("norm1", layer_norm());
    norm2 = register_module("norm2", layer_norm());
  }
  torch::Tensor forward(torch::Tensor x) {
    auto h = norm1(x);
    x = x + attention(h, h, /*causal=*/false);
    return x + feed_forward(norm2(x));
  }
  Attention attention{nullptr};
  FeedForward feed_forward{nullptr};
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
};
FSDP2_MODULE(EncoderLayer);

struct DecoderLayerImpl : nn::Module {
  DecoderLayerImpl() {
    self_attention = register_module("self_attention", Attention(kDim, kHeads));
    cross_attention = register_module("cross_attention", Attention(kDim, kHeads));
    feed_forward = register_module("feed_forward", FeedForward(kDim));
    norm1 = register_module("norm1", layer_norm());
    norm2 = register_module("norm2", layer_norm());
    norm3 = register_module("norm3", layer_norm());
  }
  torch::Tensor forward(torch::Tensor x, const torch::Tensor& memory) {
    auto h = norm1(x);
    x = x + self_attention(h, h, /*causal=*/true);
    x = x + cross_attention(norm2(x), memory, /*causal=*/false);
    return x + feed_forward(norm3(x));
  }
  Attention self_attention{nullptr}, cross_attention{nullptr};
  FeedForward feed_forward{nullptr};
  nn::LayerNorm norm1{nullptr}, norm2{nullptr}, norm3{nullptr};
};
FSDP2_MODULE(DecoderLayer);

struct Seq2SeqImpl : nn::Module {
  Seq2SeqImpl() {
    embedding = register_module("embedding", nn::Embedding(kVocabulary, kDim));
    nn::init::normal_(embedding->weight, 0, 1 / std::sqrt(static_cast<double>(kDim)));
    positions = register_parameter("positions", 0.02 * torch::randn({kLength, kDim}));
    encoder = register_module("encoder", nn::ModuleList());
    decoder = register_module("decoder", nn::ModuleList());
    for (int64_t i = 0; i < kLayers; ++i) {
      encoder->push_back(EncoderLayer());
      decoder->push_back(DecoderLayer());
    }
    norm = register_module("norm", layer_norm());
  }
  torch::Tensor encode(const torch::Tensor& source) {
    auto x = embedding(source) + positions;
    for (const auto& layer : *encoder) x = fsdp2::call(*layer->as<EncoderLayer>(), x);
    return x;
  }
  torch::Tensor forward(const torch::Tensor& source, const torch::Tensor& target) {
    auto memory = encode(source);
    auto x = embedding(target) + positions.slice(0, 0, target.size(1));
    for (const auto& layer : *decoder) x = fsdp2::call(*layer->as<DecoderLayer>(), x, memory);
    return torch::matmul(norm(x), embedding->weight.t());  // tied
  }
  nn::Embedding embedding{nullptr};
  torch::Tensor positions;
  nn::ModuleList encoder{nullptr}, decoder{nullptr};
  nn::LayerNorm norm{nullptr};
};
FSDP2_MODULE(Seq2Seq);

double rate(int64_t step) { return kPeakRate * std::min((step + 1) / kWarmup, std::sqrt(kWarmup / (step + 1))); }

int main(int argc, char** argv) try {
  int64_t steps = 200, save_every = 0;
  std::string checkpoint = "encoder_decoder.pt";
  bool resume = false, check = false;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--resume")
      resume = true;
    else if (option == "--check")
      check = true;
    else if (option == "--steps" && i + 1 < argc)
      steps = std::stoll(argv[++i]);
    else if (option == "--save-every" && i + 1 < argc)
      save_every = std::stoll(argv[++i]);
    else if (option == "--checkpoint" && i + 1 < argc)
      checkpoint = argv[++i];
    else {
      std::cerr << "unknown option " << option << '\n';
      return 2;
    }
  }

  torch::manual_seed(3);
  fsdp2::init_process_group();
  const int rank_ = fsdp2::get_rank(), ranks = fsdp2::get_world_size();
  if (rank_ != 0) std::cout.setstate(std::ios::failbit);
  const torch::Device device = fsdp2::local_device();
  auto model = Seq2Seq();
  model->to(device);
  for (const auto& layer : *model->encoder) fsdp2::fully_shard(layer);
  for (const auto& layer : *model->decoder) fsdp2::fully_shard(layer);
  fsdp2::fully_shard(model);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(kPeakRate).betas({0.9, 0.98}));

  auto state = [&](int64_t step) {
    return fsdp2::dcp::StateDict{{"app", fsdp2::app_state(model, optimizer)}, {"step", step}};
  };
  int64_t first_step = 0;
  if (resume) {
    auto saved = state(0);
    fsdp2::dcp::load(saved, checkpoint);
    first_step = saved["step"].integer();
  }

  for (int64_t step = first_step; step < steps; ++step) {
    for (auto& group : optimizer.param_groups())
      static_cast<torch::optim::AdamOptions&>(group.options()).lr(rate(step));

    auto generator = torch::make_generator<torch::CPUGeneratorImpl>(1000 + step);
    auto source = torch::randint(1, kVocabulary, {kBatch, kLength}, generator, torch::kLong).to(device);
    source = source.slice(0, rank_, kBatch / ranks * ranks, ranks);
    auto target = source.flip(1);
    auto shifted = torch::cat({torch::full_like(target.slice(1, 0, 1), kStart), target.slice(1, 0, kLength - 1)}, 1);

    auto logits = model(source, shifted);
    auto loss = torch::cross_entropy_loss(logits.view({-1, kVocabulary}), target.reshape(-1));
    optimizer.zero_grad();
    loss.backward();
    const double norm = nn::utils::clip_grad_norm_(model->parameters(), kMaxNorm);
    optimizer.step();
    auto mean = loss.detach() / ranks;
    fsdp2::all_reduce(mean);
    std::cout << "step " << step << " loss " << std::fixed << std::setprecision(6) << mean.item<float>() << " norm "
              << norm << " lr " << rate(step) << std::endl;

    if (save_every > 0 && (step + 1) % save_every == 0) {
      fsdp2::dcp::save(state(step + 1), checkpoint, {.overwrite = true});
      std::cout << "saved " << checkpoint << std::endl;
    }
  }
  if (check) std::cout << fsdp2::diagnose(model, &optimizer).to_table() << std::endl;
  fsdp2::destroy_process_group();
} catch (const c10::Error& error) {
  std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  return 1;
}
