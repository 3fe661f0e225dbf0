#pragma once

// Names in the folders in which HuggingFace's libraries keep models.

#include <cstdio>
#include <string>

namespace fsdp2::dcp::detail {

inline constexpr const char* kSafetensorsIndex = "model.safetensors.index.json";

/// "model-00001-of-00003.safetensors"; `number` counts from 1.
inline std::string safetensors_file_name(size_t number, size_t count) {
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", number, count);
  return name;
}

}  // namespace fsdp2::dcp::detail
