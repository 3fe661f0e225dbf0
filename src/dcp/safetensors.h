#pragma once

// The safetensors format: 8 bytes with the length of a header, the header as JSON, the data of all tensors.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "dcp/zip_archive.h"

namespace fsdp2::dcp::detail {

struct SafetensorsTensor {
  std::string name;
  at::ScalarType dtype{};
  std::vector<int64_t> sizes;
  uint64_t begin = 0, end = 0;  // of its bytes, contiguous, counted from the start of the blob
};

using SafetensorsNotes = std::map<std::string, std::string>;  // the header's __metadata__

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // in the order of their data
  SafetensorsNotes notes;

  /// Null where there is none of that name.
  const SafetensorsTensor* find(const std::string& name) const;
  std::unordered_map<std::string, size_t> by_name = {};
};

/// Reads and checks the header of a blob that fills `bytes`: its data are covered by its tensors without gap and
/// overlap. kCorruption naming file, tensor and offset; kUnsupported for a dtype that torch does not have.
SafetensorsHeader read_safetensors_header(const ByteRange& bytes);

/// Makes what comes before the data. Tensors are brought into the order in which their data have to follow, bigger
/// elements first so that all are aligned, and get their `begin` and `end`. kInvalidArgument for names that are there
/// twice or are not UTF-8, kUnsupported for a dtype that the format does not have.
std::string make_safetensors_header(std::vector<SafetensorsTensor>& tensors, const SafetensorsNotes& notes);

/// "BF16" for bfloat16; empty where the format has no such dtype.
std::string_view safetensors_dtype(at::ScalarType type);
std::optional<at::ScalarType> dtype_from_safetensors(std::string_view name);

}  // namespace fsdp2::dcp::detail
