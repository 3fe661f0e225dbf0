#pragma once

// Files of a checkpoint: written once from start to end, read by ranges, made visible by one
// rename.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace fsdp2::dcp::detail {

/// A new file, written in order.
class FileWriter {
 public:
  explicit FileWriter(const std::filesystem::path& path);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;

  void write(const void* data, size_t size);
  uint64_t position() const { return position_; }
  /// Everything is on the disk when this returns. Without it the file is left unfinished.
  void close();

 private:
  void flush();
  void put(const char* data, size_t size);

  std::filesystem::path path_;
  int file_ = -1;
  uint64_t position_ = 0;
  std::vector<char> buffer_;
};

/// A regular file inside a checkpoint folder; links are refused.
class FileReader {
 public:
  FileReader(const std::filesystem::path& folder, const std::string& name);
  ~FileReader();
  FileReader(const FileReader&) = delete;

  uint64_t size() const { return size_; }
  const std::string& name() const { return name_; }
  void read(uint64_t offset, void* out, size_t size) const;

 private:
  std::string name_;  // with the folder, for messages
  int file_ = -1;
  uint64_t size_ = 0;
};

/// kCorruption unless `name` is a plain file name, as every writer makes them.
void check_file_name(const std::string& name);

/// The folder in which a checkpoint grows until commit() gives it its name. Used by one rank.
class StagingFolder {
 public:
  /// Refuses a target that is not a checkpoint, or is one and may not be overwritten.
  static StagingFolder create(const std::filesystem::path& target, bool overwrite);

  const std::filesystem::path& path() const { return path_; }
  /// Moves the folder to its target, whole or not at all; an old checkpoint is removed after that.
  void commit();
  void discard() noexcept;

 private:
  StagingFolder(std::filesystem::path path, std::filesystem::path target, bool overwrite)
      : path_(std::move(path)), target_(std::move(target)), overwrite_(overwrite) {}
  static void check_target(const std::filesystem::path& target, bool overwrite);
  std::filesystem::path path_, target_;
  bool overwrite_;
};

}  // namespace fsdp2::dcp::detail
