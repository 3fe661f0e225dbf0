#pragma once

// Numbers, values and tables for people.

#include <fsdp2/dcp/value.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp2::tool {

/// "1.5 GiB".
std::string bytes_text(uint64_t bytes);
/// "[2, 3]".
std::string shape_text(const std::vector<int64_t>& sizes);
/// "1 tensor", "2 tensors".
std::string count_text(size_t count, const std::string& what);
/// The first `most` of them with commas, and how many more there are.
std::string list_text(const std::vector<std::string>& words, size_t most = 5);
/// As Python shows it; what is longer than `limit` is cut.
std::string value_text(const dcp::Value& value, size_t limit = 200);
/// Control characters and bytes that are not UTF-8 made visible.
std::string printable(const std::string& text);

/// Left-aligned columns with two spaces between them.
class Table {
 public:
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace fsdp2::tool
