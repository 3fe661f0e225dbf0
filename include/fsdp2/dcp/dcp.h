#pragma once

// Checkpoints in PyTorch's distributed format (DCP). Python twin: torch.distributed.checkpoint.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <fsdp2/dcp/value.h>
#include <fsdp2/export.h>
#include <fsdp2/process_group.h>

namespace fsdp2::dcp {

struct SaveOptions {
  /// Replace a checkpoint that is there already. The old one stays whole until the new one is
  /// complete. A folder with files that are not of a checkpoint is never replaced.
  bool overwrite = false;
  /// Ranks that take part; {} = the default group, or this process alone without one.
  ProcessGroup group = {};
  /// Store a CRC-32 of every record.
  bool checksums = true;
};

struct LoadOptions {
  /// Keys that the checkpoint lacks keep their value and are reported; otherwise they are an error.
  bool allow_partial = false;
  /// Accept casts that can lose information (float to int, fp32 to bf16, ...); otherwise they are
  /// an error.
  bool allow_narrowing = false;
  /// Compare the CRC-32 of what is read (where the writer computed one).
  bool verify_checksums = true;
  ProcessGroup group = {};
};

/// What load() did, by key.
struct LoadReport {
  std::vector<std::string> loaded;
  std::vector<std::string> missing;     ///< asked for, not in the checkpoint (allow_partial)
  std::vector<std::string> unexpected;  ///< in the checkpoint, not asked for
  std::vector<std::string> cast;        ///< loaded with another dtype than saved
  std::vector<std::string> reshaped;    ///< one element, saved with another number of dimensions, e.g. (1,) into ()
};

/// A box of a tensor that was saved as one item.
struct Chunk {
  std::vector<int64_t> offsets, sizes;
};
struct TensorEntry {
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::vector<Chunk> chunks;
};
struct BytesEntry {};

struct Metadata {
  std::vector<std::pair<std::string, std::variant<TensorEntry, BytesEntry>>> entries;
  /// Where an fqn sat in the nested state: text = key of a dict, number = index of a list.
  std::map<std::string, std::vector<std::variant<std::string, int64_t>>> paths;
};

/// Writes `state` as the folder `path`; returns what was written. Every rank of the group calls it,
/// with the same path on a file system that all share. Every rank writes its own file, a value that
/// several ranks hold is written by one of them; the folder appears under its name only when it is
/// complete. DTensors are saved shard by shard. Errors of any rank reach every rank: kInvalidArgument
/// (`path` exists and `overwrite` is false, a plain value differs between ranks, two keys flatten to
/// one name, ...), kIo, kUnsupported.
///
///     fsdp2::dcp::StateDict state;
///     state["model"] = fsdp2::get_model_state_dict(model);
///     state["step"] = 100;
///     fsdp2::dcp::save(state, "runs/step_100");
FSDP2_API Metadata save(const StateDict& state, const std::filesystem::path& path, const SaveOptions& options = {});

/// Fills `state` from the checkpoint: tensors in place (any sharding, any number of ranks on either
/// side; meta tensors are replaced), other values by assignment. Every rank of the group calls it.
/// Nothing is changed unless all ranks find all that they need. Errors: kNotFound (no checkpoint,
/// missing keys), kInvalidArgument (other size; a narrowing cast), kCorruption (bad checksum,
/// holes, truncated), kUnsupported, kIo.
FSDP2_API LoadReport load(StateDict& state, const std::filesystem::path& path, const LoadOptions& options = {});

/// A value that is meant to differ between ranks. Not offered yet: throws kUnsupported.
FSDP2_API Value per_rank(Value value);

/// Reads a checkpoint without a target and without other ranks.
class FSDP2_API Reader {
 public:
  /// Of `options` only verify_checksums matters here.
  explicit Reader(const std::filesystem::path& path, const LoadOptions& options = {});
  ~Reader();
  Reader(Reader&&) noexcept;
  Reader& operator=(Reader&&) noexcept;

  const Metadata& metadata() const;
  /// The whole tensor (plain, CPU) or the value. kNotFound if there is no such key.
  Value read(const std::string& fqn);
  /// Everything, nested as it was saved.
  StateDict read_all();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdp2::dcp
