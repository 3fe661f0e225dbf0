#pragma once

// The three formats as destinations of a conversion.

#include <fsdp2/dcp/convert.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dcp/convert_plan.h"

namespace fsdp2::dcp::detail {

/// Where a result grows until it is checked.
class ConvertTarget {
 public:
  virtual ~ConvertTarget() = default;
  /// What is there so far can be opened under this path.
  virtual std::filesystem::path path() const = 0;
  virtual std::unique_ptr<OutputFile> create(const std::string& name) = 0;
  /// Gives it its name. Without this it vanishes with the object.
  virtual void commit() = 0;
};
/// kInvalidArgument where `destination` is there and may not be replaced.
std::unique_ptr<ConvertTarget> make_folder_target(const std::filesystem::path& destination, bool overwrite);
/// Of one file: the name given to create() does not matter.
std::unique_ptr<ConvertTarget> make_file_target(const std::filesystem::path& destination, bool overwrite);

using Consume = std::function<void(const void*, size_t)>;

/// Gives out the elements of the plan, as they are to be written.
class ConvertInput {
 public:
  virtual ~ConvertInput() = default;
  /// The bytes of a box of tensor `tensor` of the plan, in row-major order.
  virtual void stream(size_t tensor, const Chunk& box, const Consume& consume) = 0;
  /// The box as a whole.
  virtual at::Tensor read(size_t tensor, const Chunk& box) = 0;
  virtual Value value(size_t value) = 0;
};

void write_dcp(ConvertTarget& target, const ConvertPlan& plan, ConvertInput& input, int ranks);
/// As one file if `single`, else a folder with an index.
void write_safetensors(ConvertTarget& target, const ConvertPlan& plan, ConvertInput& input, uint64_t max_file_bytes,
                       bool single);
void write_torch_save(ConvertTarget& target, const ConvertPlan& plan, ConvertInput& input);

/// The rows of a tensor that rank `rank` of `ranks` has under fully_shard. A tensor without dimensions, or without
/// elements, belongs to rank 0.
Chunk rows_of_rank(const std::vector<int64_t>& sizes, int rank, int ranks);

}  // namespace fsdp2::dcp::detail
