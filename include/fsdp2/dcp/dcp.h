#pragma once

// Checkpoints in PyTorch's distributed format (DCP). Python twin: torch.distributed.checkpoint.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <fsdp2/dcp/storage.h>
#include <fsdp2/dcp/value.h>
#include <fsdp2/export.h>
#include <fsdp2/process_group.h>

namespace fsdp2::dcp {

/// Which rank writes a part that several ranks hold.
enum class Replicas {
  Spread,     ///< the one with the least to write so far
  LowestRank  ///< always the lowest: what one host needs is on its own disk
};

struct SaveOptions {
  /// Replace a checkpoint that is there already. The old one stays whole until the new one is
  /// complete. A folder with files that are not of a checkpoint is never replaced.
  bool overwrite = false;
  /// Ranks that take part; {} = the default group, or this process alone without one.
  ProcessGroup group = {};
  /// Store a CRC-32 of every record, and those of every item in the file `.checksums`, which Python ignores.
  bool checksums = true;
  Replicas replicas = Replicas::Spread;
  /// Files that each rank writes; 2 or more are written by as many threads.
  int files_per_rank = 1;
  /// One file for each item instead.
  bool file_per_item = false;
  /// Tensors of a file as one safetensors blob instead of one torch.save archive each. Python's reader does not read
  /// it back.
  bool safetensors = false;
  /// Compress every item with zstd. Python needs the package zstandard to read it.
  bool zstd = false;
  /// Every rank describes its own items (`__0.metadata`) and none waits for the others' plans. Python 2.9 and later
  /// read it, on as many ranks.
  bool rank_local_metadata = false;
  /// {} = local_storage().
  std::shared_ptr<Storage> storage = {};
};

struct LoadOptions {
  /// Keys that the checkpoint lacks keep their value and are reported; otherwise they are an error.
  bool allow_partial = false;
  /// Accept casts that can lose information (float to int, fp32 to bf16, ...); otherwise they are
  /// an error.
  bool allow_narrowing = false;
  /// Compare the checksums of what is read (where the writer computed them).
  bool verify_checksums = true;
  ProcessGroup group = {};
  /// Keys that may be missing, as patterns in which * stands for any text: {"model.head.*"}.
  std::vector<std::string> allow_missing = {};
  /// Keys of the checkpoint that need not be asked for, as such patterns; others are an error then. nullopt = all.
  std::optional<std::vector<std::string>> allow_unexpected = std::nullopt;
  /// Tensors that every rank needs whole are read by one and broadcast. nullopt = where ranks are on several hosts.
  std::optional<bool> broadcast_replicas = std::nullopt;
  /// {} = local_storage().
  std::shared_ptr<Storage> storage = {};
};

/// What load() did, by key.
struct LoadReport {
  std::vector<std::string> loaded;
  std::vector<std::string> missing;     ///< asked for, not in the checkpoint (allow_partial)
  std::vector<std::string> unexpected;  ///< in the checkpoint, asked for by no rank
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

/// How far a save is, in bytes of this rank.
struct SaveProgress {
  uint64_t done = 0, total = 0;
};

/// A save that goes on in the background. Movable; a future that is dropped changes nothing: the save goes on, and its
/// error comes up at the next save or load, or in the log at the end of the process.
class FSDP2_API SaveFuture {
 public:
  SaveFuture() = default;
  bool valid() const noexcept { return state_ != nullptr; }
  /// It has ended, well or not. Does not block.
  bool ready() const;
  SaveProgress progress() const;
  /// Blocks until the checkpoint is complete on all ranks. Throws what the save threw.
  void wait() const;
  /// wait(), then what was written.
  Metadata get() const;

  struct State;
  explicit SaveFuture(std::shared_ptr<State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<State> state_;
};

/// save() that returns as soon as the state is copied: what is written is the state at the time of the call. Every
/// rank of the group calls it. The copy goes to buffers that the next call uses again (one copy of the state, until
/// release_async_buffers()). One save runs at a time: another save or a load waits for it first, and throws its error
/// if nobody asked the future. Writing and its exchanges use a thread and groups of their own. A process that ends
/// with exit() or by returning from main() finishes the save first. All errors come from the future, on every rank:
/// those of the state (kInvalidArgument, kUnsupported) and of writing, and, in place of this save, that of an async
/// save before whose future nobody asked.
FSDP2_API SaveFuture async_save(const StateDict& state, const std::filesystem::path& path,
                                const SaveOptions& options = {});
/// Frees the buffers of async_save, after the save that runs. Not collective.
FSDP2_API void release_async_buffers();

/// Fills `state` from the checkpoint: tensors in place (any sharding, any number of ranks on either
/// side; meta tensors are replaced), other values by assignment. Every rank of the group calls it.
/// Nothing is changed unless all ranks find all that they need; damage that shows while tensors are read comes after
/// some of them have changed. Errors: kNotFound (no checkpoint,
/// missing keys), kInvalidArgument (other size; a narrowing cast), kCorruption (bad checksum,
/// holes, truncated), kUnsupported, kIo.
FSDP2_API LoadReport load(StateDict& state, const std::filesystem::path& path, const LoadOptions& options = {});

/// Marks a value (or tensor) of a state dict as meant to differ between ranks: rank r saves it under `<key>.<r>` and
/// loads it from there. A rank that the saving run did not have misses its key.
FSDP2_API Value per_rank(Value value);

/// Something wrong with a checkpoint.
struct Fault {
  std::string file;     ///< its name in the folder
  std::string key;      ///< empty where it belongs to none
  uint64_t offset = 0;  ///< in the file
  std::string text;     ///< what was expected and what is there
};
struct VerifyReport {
  size_t files = 0, items = 0;
  uint64_t bytes = 0;  ///< that were read
  bool has_checksums = false;  ///< there is a `.checksums`; without it only the CRC-32 of the records are compared
  std::vector<Fault> faults;
  std::vector<std::string> unreferenced;  ///< files that the metadata do not mention, e.g. of an earlier save
  bool ok() const { return faults.empty(); }
};

/// Reads all of a checkpoint and compares it with its checksums and its metadata. Not collective. kNotFound if there is
/// no checkpoint; damage is in the report, `.metadata` that cannot be read included.
/// `progress` is told bytes read, and of how many.
FSDP2_API VerifyReport verify(const std::filesystem::path& path, const LoadOptions& options = {},
                              const std::function<void(uint64_t done, uint64_t total)>& progress = {});

/// Reads a checkpoint without a target and without other ranks.
class FSDP2_API Reader {
 public:
  /// Of `options` only verify_checksums and storage matter here.
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
