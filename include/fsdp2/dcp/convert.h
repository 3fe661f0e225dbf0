#pragma once

// What is in a checkpoint, and turning one format into another: DCP folders, safetensors (HuggingFace folders and
// single files), files of torch.save. Nothing here is collective. Python twin:
// torch.distributed.checkpoint.format_utils.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/dcp/value.h>
#include <fsdp2/export.h>

namespace fsdp2::dcp {

enum class Format {
  Dcp,          ///< a folder with `.metadata`
  Safetensors,  ///< a folder of `*.safetensors`, with or without an index, or one such file
  TorchSave     ///< a file of torch.save with a dict of plain data
};
/// "DCP", "safetensors", "torch.save".
FSDP2_API const char* to_string(Format format) noexcept;
/// The name of a dtype in Python without "torch.", e.g. "bfloat16"; nullopt if there is none of that name.
FSDP2_API std::string dtype_text(at::ScalarType dtype);
FSDP2_API std::optional<at::ScalarType> parse_dtype(const std::string& name);

/// One key of a checkpoint.
struct ItemInfo {
  std::string key;
  std::optional<at::ScalarType> dtype;  ///< none: a plain value
  std::vector<int64_t> sizes;
  uint64_t bytes = 0;              ///< of the elements; of a value, of its item
  size_t chunks = 0;               ///< pieces in which it lies
  std::vector<std::string> files;  ///< that hold it
  std::optional<Value> value;      ///< see InspectOptions::values
};
struct FileInfo {
  std::string name;
  uint64_t bytes = 0;
};
struct CheckpointContents {
  Format format{};
  std::vector<ItemInfo> items;
  std::vector<FileInfo> files;         ///< that hold the items
  std::vector<FileInfo> unreferenced;  ///< of the folder, but of no use for the checkpoint, e.g. of an earlier save
  int num_ranks = 0;                   ///< that wrote it, as far as the names of files tell (DCP)
  std::map<std::string, std::string> notes;  ///< __metadata__ of safetensors files
};

struct InspectOptions {
  /// Only keys that match one of these patterns, in which * stands for any text.
  std::vector<std::string> keys = {};
  /// Read plain values, and tensors of at most 16 elements.
  bool values = false;
};
/// Lists a checkpoint; without `values` only headers are read. kNotFound if there is none, kCorruption where what was
/// read is damaged, kInvalidArgument for a pattern that no key matches.
FSDP2_API CheckpointContents inspect(const std::filesystem::path& path, const InspectOptions& options = {});

/// A rule that gives keys another name.
struct RenameRule {
  /// A pattern for a whole key, in which * stands for any text, or a regular expression between slashes: "model.*",
  /// "/^(h|layers)[.]([0-9]+)/".
  std::string from;
  /// What takes its place; * are the texts that the stars of `from` stood for, in order, $1 the groups of an
  /// expression.
  std::string to;
};

struct ConvertProgress {
  bool checking = false;  ///< the second pass, which reads back what was written
  uint64_t done = 0, total = 0;  ///< bytes
};

struct ConvertOptions {
  /// Of the destination. nullopt: what its name says (.safetensors, .pt, .pth, .bin), else the other one of DCP and
  /// safetensors.
  std::optional<Format> format = std::nullopt;
  /// Replace what is there. It stays whole until the new one is complete and checked.
  bool overwrite = false;
  /// Only keys of the source that match one of these patterns; empty = all.
  std::vector<std::string> keys = {};
  /// The first rule that matches a key counts. Applied to keys of the source.
  std::vector<RenameRule> rename = {};
  /// Pairs of names in the destination of which the first is another name of the second (tied weights): it is left out
  /// of safetensors, and made from the second one elsewhere if the source lacks it. Both are compared where both are
  /// there.
  std::vector<std::pair<std::string, std::string>> tied = {};
  /// Convert floating-point tensors to this.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// Only tensors that match one of these patterns (of keys of the source). Empty: all but those without dimensions,
  /// which count steps.
  std::vector<std::string> cast = {};
  /// Of a DCP folder: files, each with the part of every tensor that rank r of `ranks` would hold under fully_shard.
  int ranks = 1;
  /// Of a safetensors folder: bytes of a file before the next one begins.
  uint64_t max_file_bytes = 5'000'000'000;
  /// Compare the checksums of the source.
  bool verify_checksums = true;
  std::function<void(const ConvertProgress&)> progress = {};
};

struct ConvertReport {
  Format from{}, to{};
  size_t tensors = 0, values = 0;  ///< written, and found again when the result was read back
  uint64_t bytes = 0;              ///< of the elements of all tensors
  std::vector<std::string> files;
  std::vector<std::pair<std::string, std::string>> renamed;
  std::vector<std::string> cast;      ///< keys of the source
  std::vector<std::string> left_out;  ///< plain values, which safetensors cannot hold
  std::vector<std::pair<std::string, std::string>> tied;  ///< of ConvertOptions::tied, those that were at work
  /// Matrices of the destination with the same bytes: are they tied?
  std::vector<std::vector<std::string>> equal;
};

/// Writes `destination` from `source`, piece by piece: memory is taken for some MiB, or for one chunk of a source in
/// which it lies compressed or permuted; files of torch.save are held as a whole. The result is written under another
/// name, read back and compared, and gets its name then. Errors leave `destination` as it was: kInvalidArgument (it
/// exists, two keys get one name, a pattern matches nothing, a value becomes infinite in the new dtype, ...),
/// kNotFound, kCorruption, kUnsupported (a dtype that the format does not have), kIo.
FSDP2_API ConvertReport convert(const std::filesystem::path& source, const std::filesystem::path& destination,
                                const ConvertOptions& options = {});

}  // namespace fsdp2::dcp
