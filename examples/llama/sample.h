#pragma once

#include <string>

#include "model.h"

namespace llama {

/// Continues `prompt` by `count` bytes, one drawn after the other from the model's distribution
/// made sharper by `temperature` < 1. Every process of the job calls it, and gets the same text.
std::string sample(Llama& model, const std::string& prompt, int64_t count, int64_t context, double temperature,
                   uint64_t seed);

}  // namespace llama
