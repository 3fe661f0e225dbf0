#pragma once

// Text as bytes: one token per byte, no tokenizer.

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <string>

namespace llama {

/// All text below a folder, or of one file, in the order of the paths, so that every process sees
/// the same.
class Text {
 public:
  /// Files that hold a zero byte are left out. Reads at most `max_bytes`.
  Text(const std::filesystem::path& path, int64_t max_bytes);
  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }
  int64_t num_files() const { return num_files_; }

  /// Inputs and targets, int64 (rows, length), of rows [first, first + rows) of the step's global
  /// batch. They depend on seed, step and row alone: any number of processes sees the same global
  /// batches.
  std::pair<torch::Tensor, torch::Tensor> batch(uint64_t seed, int64_t step, int64_t global_batch, int64_t first,
                                                int64_t rows, int64_t length) const;

 private:
  std::string bytes_;
  int64_t num_files_ = 0;
};

}  // namespace llama
