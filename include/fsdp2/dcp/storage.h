#pragma once

// Where checkpoints lie. A storage writes files from start to end, reads ranges of them, lists folders and makes a
// finished checkpoint visible; an object store is one class more. Python twin: torch.distributed.checkpoint.storage.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <fsdp2/export.h>

namespace fsdp2::dcp {

/// A new file. Nobody reads it before finish().
class FSDP2_API OutputFile {
 public:
  virtual ~OutputFile() = default;
  /// Appends. `data` may be used again at once.
  virtual void write(const void* data, size_t size) = 0;
  /// All of it is durable when this returns. A file that is destroyed without it may stay behind unfinished.
  virtual void finish() = 0;
};

/// A finished file. Several threads may read it.
class FSDP2_API InputFile {
 public:
  virtual ~InputFile() = default;
  /// With its folder, for messages.
  virtual const std::string& name() const = 0;
  virtual uint64_t size() const = 0;
  /// Bytes [offset, offset + size). kCorruption naming the file where it ends before, kIo where reading fails.
  virtual void read(uint64_t offset, void* out, size_t size) const = 0;
};

/// Every method throws fsdp2::Error; several threads may call. `target` and `folder` are paths of checkpoints as users
/// give them, `place` is what begin() returned, file names are plain (without separators).
class FSDP2_API Storage {
 public:
  virtual ~Storage() = default;

  /// On rank 0: checks that `target` may be written (kInvalidArgument: it holds a checkpoint and `overwrite` is false,
  /// or other things), and makes a place in which its files can grow, invisible to readers of `target`. The place is
  /// `target` itself where a storage has no rename: `.metadata` is written last, a folder without it is no checkpoint.
  virtual std::string begin(const std::filesystem::path& target, bool overwrite) = 0;
  /// On the other ranks: whether they see the place that rank 0 made.
  virtual bool sees(const std::string& place) = 0;
  virtual std::unique_ptr<OutputFile> create(const std::string& place, const std::string& name) = 0;
  /// On rank 0, after all ranks have finished their files: makes the checkpoint visible at `target`, whole or not at
  /// all; one that was there before stays whole until then, and may lie at `place` afterwards.
  virtual void commit(const std::string& place, const std::filesystem::path& target, bool overwrite) = 0;
  /// On every rank after commit(): removes its share of what that left at `place`.
  virtual void clean(const std::string& place, int rank, int world_size) noexcept = 0;
  /// On rank 0: forgets a place that is not committed.
  virtual void discard(const std::string& place) noexcept = 0;

  /// kNotFound naming the file if there is none.
  virtual std::shared_ptr<const InputFile> open(const std::filesystem::path& folder, const std::string& name) = 0;
  /// Names of the files in a folder, and of its folders with a '/' at the end, in order; empty if there is no such
  /// folder.
  virtual std::vector<std::string> list(const std::filesystem::path& folder) = 0;
  /// Removes a checkpoint, in a way that leaves no half of it under its name; nothing happens if there is none.
  virtual void remove(const std::filesystem::path& folder) = 0;
};

/// Folders of the local (or network) file system: what is used where no storage is named.
FSDP2_API std::shared_ptr<Storage> local_storage();
/// The memory of this process, for tests and for snapshots: ranks in other processes do not see it.
FSDP2_API std::shared_ptr<Storage> make_memory_storage();

}  // namespace fsdp2::dcp
