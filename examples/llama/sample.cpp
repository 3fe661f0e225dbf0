#include "sample.h"

#include <ATen/CPUGeneratorImpl.h>

namespace llama {

std::string sample(Llama& model, const std::string& prompt, int64_t count, int64_t context, double temperature,
                   uint64_t seed) {
  torch::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  auto tokens = torch::empty({1, static_cast<int64_t>(prompt.size()) + count}, torch::kInt64);
  auto* data = tokens.data_ptr<int64_t>();
  for (size_t i = 0; i < prompt.size(); ++i) data[i] = static_cast<unsigned char>(prompt[i]);
  for (auto length = static_cast<int64_t>(prompt.size()); length < tokens.size(1); ++length) {
    auto begin = std::max<int64_t>(0, length - context);
    auto logits = model(tokens.slice(1, begin, length)).select(1, -1).to(torch::kFloat32);
    auto next = torch::multinomial(torch::softmax(logits / temperature, -1), 1, false, generator).view({1});
    fsdp2::broadcast(next, 0);
    data[length] = next.item<int64_t>();
  }
  std::string text;
  for (int64_t i = 0; i < tokens.size(1); ++i) text += static_cast<char>(data[i]);
  return text;
}

}  // namespace llama
