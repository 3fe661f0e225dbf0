#pragma once

// Weights and tokens from integer hashes: the same bits in C++ and in Python (tests/peer), on any
// number of ranks. z = splitmix64(fnv1a(name) + index), all modulo 2^64.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <bit>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llama {

inline uint64_t fnv1a(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

inline uint64_t splitmix64(uint64_t x) {
  uint64_t z = x + 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

/// The whole parameter `fqn`, float32. Matrices are about 1 / sqrt(last dim) in size, vectors
/// about 1.
inline torch::Tensor hash_param(const std::string& fqn, at::IntArrayRef sizes) {
  auto out = torch::empty(sizes, torch::kFloat32);
  auto* data = out.data_ptr<float>();
  uint64_t seed = fnv1a(fqn);
  if (sizes.size() >= 2) {
    int exponent = (std::bit_width(static_cast<uint64_t>(sizes.back())) - 1) / 2;
    float unit = std::ldexp(1.0f, -(23 + exponent));
    for (int64_t i = 0; i < out.numel(); ++i) {
      auto high = static_cast<int64_t>(splitmix64(seed + static_cast<uint64_t>(i)) >> 40);
      data[i] = static_cast<float>(high - (1 << 23)) * unit;
    }
  } else {
    for (int64_t i = 0; i < out.numel(); ++i) {
      auto high = static_cast<int64_t>(splitmix64(seed + static_cast<uint64_t>(i)) >> 56);
      data[i] = 1.0f + static_cast<float>(high - 128) * 0x1p-10f;
    }
  }
  return out;
}

/// Writes hash_param into every parameter, sharded or not. Collective where they are sharded.
inline void hash_weights(fsdp2::ModuleRef module) {
  torch::NoGradGuard no_grad;
  for (auto& item : module->named_parameters()) {
    auto full = hash_param(item.key(), item.value().sizes()).to(item.value().scalar_type());
    if (fsdp2::is_dtensor(item.value())) {
      fsdp2::DTensor sharded(item.value());
      full = fsdp2::distribute_tensor(full, sharded.device_mesh(), sharded.placements()).tensor();
    }
    item.value().copy_(full);
  }
}

/// Inputs and targets, int64 (batch, seq) each, of one micro-batch of one rank.
inline std::pair<torch::Tensor, torch::Tensor> hash_tokens(int64_t step, int64_t micro, int64_t accum, int64_t rank,
                                                           int64_t world, int64_t batch, int64_t seq, int64_t vocab) {
  auto tokens = torch::empty({batch, seq + 1}, torch::kInt64);
  auto rows = tokens.accessor<int64_t, 2>();
  int64_t first = ((step * accum + micro) * world + rank) * batch;
  for (int64_t b = 0; b < batch; ++b) {
    uint64_t z = splitmix64(fnv1a("tokens") + static_cast<uint64_t>(first + b));
    auto start = static_cast<int64_t>((z >> 33) % static_cast<uint64_t>(vocab));
    auto stride = static_cast<int64_t>(1 + ((z >> 8) & 7));
    for (int64_t t = 0; t <= seq; ++t) rows[b][t] = (start + t * stride) % vocab;
  }
  return {tokens.slice(1, 0, seq).contiguous(), tokens.slice(1, 1, seq + 1).contiguous()};
}

}  // namespace llama
