#include "data.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <vector>

#include <fsdp2/error.h>

#include "hash_rule.h"

namespace llama {

namespace fs = std::filesystem;

Text::Text(const fs::path& path, int64_t max_bytes) {
  FSDP2_CHECK(fs::exists(path), kNotFound, "[data] no file or folder ", path.string(), "; give a text with --text");
  std::vector<fs::path> files;
  if (fs::is_directory(path)) {
    for (const auto& entry : fs::recursive_directory_iterator(path, fs::directory_options::skip_permission_denied)) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
  } else {
    files.push_back(path);
  }
  std::sort(files.begin(), files.end());
  for (const auto& file : files) {
    std::ifstream stream(file, std::ios::binary);
    std::string content(std::istreambuf_iterator<char>(stream), {});
    if (content.empty() || content.find('\0') != std::string::npos) continue;
    if (size() + static_cast<int64_t>(content.size()) > max_bytes) content.resize(max_bytes - size());
    bytes_ += content;
    ++num_files_;
    if (size() == max_bytes) break;
  }
}

std::pair<torch::Tensor, torch::Tensor> Text::batch(uint64_t seed, int64_t step, int64_t global_batch, int64_t first,
                                                    int64_t rows, int64_t length) const {
  FSDP2_CHECK(size() > length + 1, kInvalidArgument, "[data] the text has ", size(), " bytes; one sequence takes ",
              length + 1, ": give more text or a smaller --seq");
  auto tokens = torch::empty({rows, length + 1}, torch::kInt64);
  auto* out = tokens.data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row) {
    auto index = static_cast<uint64_t>(step * global_batch + first + row);
    auto start = splitmix64(splitmix64(seed) + index) % static_cast<uint64_t>(size() - length - 1);
    for (int64_t t = 0; t <= length; ++t) *out++ = static_cast<unsigned char>(bytes_[start + t]);
  }
  return {tokens.slice(1, 0, length).contiguous(), tokens.slice(1, 1, length + 1).contiguous()};
}

}  // namespace llama
