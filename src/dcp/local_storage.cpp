#include <fsdp2/dcp/storage.h>
#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <vector>

#include "dcp/file_names.h"

namespace fsdp2::dcp {
namespace {

namespace fs = std::filesystem;
using detail::check_file_name;
using detail::is_checkpoint_file;
using detail::kOldMark;

[[noreturn]] void throw_errno(const char* doing, const fs::path& path, int error = errno) {
  FSDP2_THROW(kIo, "[dcp] ", doing, " ", path.string(), " failed: ", std::strerror(error));
}

/// Makes the names in a folder durable.
void sync_folder(const fs::path& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) throw_errno("opening the folder", folder);
  const int result = ::fsync(file);
  const int error = errno;
  ::close(file);
  // Some network file systems cannot sync folders and say so.
  if (result != 0 && error != EINVAL && error != ENOTSUP) throw_errno("syncing the folder", folder, error);
}

/// What a folder holds, in any order; what was read before it, where there is an `error`. Going through the iterator
/// with range-for instead throws another exception than ours when reading the folder fails midway.
std::vector<fs::directory_entry> entries_of(const fs::path& folder, std::error_code& error) {
  std::vector<fs::directory_entry> entries;
  fs::directory_iterator next(folder, error);
  for (; !error && next != fs::directory_iterator(); next.increment(error)) entries.push_back(*next);
  return entries;
}

/// Makes a folder and those above it, durably: the name of each one made is a change of the folder above.
void make_folders(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> missing;
  for (fs::path path = folder; path.has_relative_path() && !fs::exists(path, error); path = path.parent_path())
    missing.push_back(path);
  fs::create_directories(folder, error);
  if (error) throw_errno("making the folder", folder, error.value());
  for (const fs::path& path : missing) sync_folder(path.parent_path());
}

class LocalOutput final : public OutputFile {
 public:
  explicit LocalOutput(fs::path path) : path_(std::move(path)) {
    file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file_ < 0) throw_errno("creating", path_);
  }
  ~LocalOutput() override {
    if (file_ >= 0) ::close(file_);
  }
  LocalOutput(const LocalOutput&) = delete;

  void write(const void* data, size_t size) override {
    const auto* bytes = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t written = ::write(file_, bytes, std::min<size_t>(size, size_t{1} << 30));
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) throw_errno("writing", path_);
      bytes += written;
      size -= static_cast<size_t>(written);
      written_ += written;
    }
    // The disk begins with what is there while the rest is copied: finish() waits less.
    if (written_ - started_ >= kWriteBackBytes) {
      ::sync_file_range(file_, started_, written_ - started_, SYNC_FILE_RANGE_WRITE);
      started_ = written_;
    }
  }
  void finish() override {
    if (::fsync(file_) != 0) throw_errno("syncing", path_);
    const int file = file_;
    file_ = -1;
    if (::close(file) != 0) throw_errno("closing", path_);
  }

 private:
  static constexpr off_t kWriteBackBytes = off_t{8} << 20;

  fs::path path_;
  int file_ = -1;
  off_t written_ = 0, started_ = 0;
};

/// A regular file inside a checkpoint folder; links are refused.
class LocalInput final : public InputFile {
 public:
  LocalInput(const fs::path& folder, const std::string& name) : name_((folder / name).string()) {
    check_file_name(name);
    file_ = ::open(name_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file_ < 0) {
      const int error = errno;
      FSDP2_CHECK(error != ENOENT, kNotFound, "[dcp] the file ", name_, " of the checkpoint is missing");
      FSDP2_CHECK(error != ENOTDIR, kInvalidArgument, "[dcp] ", folder.string(),
                  " is a file; expected the folder of a ",
                  "checkpoint. `fsdp2 checkpoint convert` makes one of a file of torch.save or safetensors");
      FSDP2_CHECK(error != ELOOP, kCorruption, "[dcp] ", name_, " is a link; a checkpoint holds plain files only");
      throw_errno("opening", name_, error);
    }
    struct stat status {};
    const bool regular = ::fstat(file_, &status) == 0 && S_ISREG(status.st_mode);
    if (!regular) {
      ::close(file_);
      FSDP2_THROW(kCorruption, "[dcp] ", name_, " is not a regular file");
    }
    size_ = static_cast<uint64_t>(status.st_size);
  }
  ~LocalInput() override { ::close(file_); }
  LocalInput(const LocalInput&) = delete;

  const std::string& name() const override { return name_; }
  uint64_t size() const override { return size_; }
  void read(uint64_t offset, void* out, size_t size) const override {
    FSDP2_CHECK(offset <= size_ && size <= size_ - offset, kCorruption, "[dcp] ", name_, " has ", size_,
                " bytes; wanted are ", size, " at offset ", offset, "; the file was cut or the metadata lie");
    auto* bytes = static_cast<char*>(out);
    while (size > 0) {
      const ssize_t got = ::pread(file_, bytes, std::min<size_t>(size, size_t{1} << 30), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw_errno("reading", name_);
      FSDP2_CHECK(got > 0, kCorruption, "[dcp] ", name_, " ended at offset ", offset, " while it was read");
      bytes += got;
      offset += static_cast<uint64_t>(got);
      size -= static_cast<size_t>(got);
    }
  }

 private:
  std::string name_;  // with the folder
  int file_ = -1;
  uint64_t size_ = 0;
};

/// Refuses a target that is not a checkpoint, or is one and may not be overwritten.
void check_target(const fs::path& target, bool overwrite) {
  std::error_code error;
  const fs::file_status status = fs::status(target, error);
  if (status.type() == fs::file_type::not_found) return;
  if (status.type() == fs::file_type::none) throw_errno("looking at", target, error.value());
  FSDP2_CHECK(status.type() == fs::file_type::directory, kInvalidArgument, "[dcp] cannot save to ", target.string(),
              ": it is not a folder");
  const std::vector<fs::directory_entry> entries = entries_of(target, error);
  if (error) throw_errno("listing", target, error.value());
  for (const fs::directory_entry& entry : entries) {
    FSDP2_CHECK(overwrite, kInvalidArgument, "[dcp] cannot save to ", target.string(), ": the folder is not empty",
                fs::exists(target / ".metadata", error) ? " (it holds a checkpoint)" : "",
                "; choose another path or set overwrite = true");
    FSDP2_CHECK(is_checkpoint_file(entry.path().filename().string()), kInvalidArgument, "[dcp] cannot save to ",
                target.string(), ": it holds ", entry.path().filename().string(),
                ", which is not part of a checkpoint; overwriting replaces the whole folder, so "
                "choose another path");
  }
}

fs::path resolved(const fs::path& requested) {
  FSDP2_CHECK(!requested.empty(), kInvalidArgument, "[dcp] the path of a checkpoint is empty");
  std::error_code error;
  fs::path target = fs::absolute(requested, error);
  if (!error) target = fs::weakly_canonical(target, error);
  if (error) throw_errno("resolving", requested, error.value());
  if (target.filename().empty()) target = target.parent_path();  // "dir/"
  FSDP2_CHECK(target.has_filename(), kInvalidArgument, "[dcp] ", target.string(), " cannot be a checkpoint");
  return target;
}

std::string staging_prefix(const fs::path& target) {
  return "." + target.filename().string().substr(0, 200).append(detail::kStagingMark);
}

void remove_tree(const fs::path& path) noexcept {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) FSDP2_LOG_WARN("[dcp] could not remove ", path.string(), ": ", error.message());
}

/// A lock on a staging folder says that its save is alive; it goes with the process. -1 where somebody has it, or the
/// file system has no locks.
int try_lock(const fs::path& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (file < 0) return -1;
  if (::flock(file, LOCK_EX | LOCK_NB) == 0) return file;
  ::close(file);
  return -1;
}

class LocalStorage final : public Storage {
 public:
  std::string begin(const fs::path& requested, bool overwrite) override {
    const fs::path target = resolved(requested);
    make_folders(target.parent_path());
    clean_up(target);
    check_target(target, overwrite);
    fs::path place = make_folder_beside(target);
    const std::lock_guard guard(mutex_);
    locks_[place.string()] = try_lock(place);
    return place.string();
  }

  bool sees(const std::string& place) override {
    std::error_code error;
    return fs::is_directory(place, error);
  }

  std::unique_ptr<OutputFile> create(const std::string& place, const std::string& name) override {
    check_file_name(name);
    return std::make_unique<LocalOutput>(fs::path(place) / name);
  }

  void commit(const std::string& place, const fs::path& requested, bool overwrite) override {
    const fs::path target = resolved(requested);
    sync_folder(place);
    check_target(target, overwrite);  // somebody may have been faster
    std::error_code error;
    if (!fs::exists(target, error) || fs::is_empty(target, error)) {
      if (::rename(place.c_str(), target.c_str()) != 0) throw_errno("renaming the finished checkpoint to", target);
      return sync_folder(target.parent_path());
    }
    // Swaps both names in one step where the file system can; `place` is the old checkpoint then.
    constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE of linux/fs.h
    if (::syscall(SYS_renameat2, AT_FDCWD, place.c_str(), AT_FDCWD, target.c_str(), kExchange) == 0) {
      return sync_folder(target.parent_path());
    }
    if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP)
      throw_errno("swapping in the finished checkpoint at", target);
    const fs::path aside = place + std::string(kOldMark);
    if (::rename(target.c_str(), aside.c_str()) != 0) throw_errno("moving the old checkpoint aside at", target);
    if (::rename(place.c_str(), target.c_str()) != 0) {
      const int failure = errno;
      ::rename(aside.c_str(), target.c_str());
      throw_errno("renaming the finished checkpoint to", target, failure);
    }
    sync_folder(target.parent_path());
    remove_tree(aside);
  }

  void clean(const std::string& place, int rank, int world_size) noexcept override {
    // Freeing the pages of a big file takes long: all ranks help, rank 0 removes what is left.
    std::error_code error;
    std::vector<fs::directory_entry> files = entries_of(place, error);
    std::sort(files.begin(), files.end());
    for (size_t i = 0; i < files.size(); ++i) {
      if (i % static_cast<size_t>(world_size) == static_cast<size_t>(rank)) fs::remove(files[i].path(), error);
    }
    if (rank == 0) discard(place);
  }

  void discard(const std::string& place) noexcept override {
    remove_tree(place);
    unlock(place);
  }

  std::shared_ptr<const InputFile> open(const fs::path& folder, const std::string& name) override {
    return std::make_shared<LocalInput>(folder, name);
  }

  std::vector<std::string> list(const fs::path& folder) override {
    std::vector<std::string> names;
    std::error_code error;
    const std::vector<fs::directory_entry> entries = entries_of(folder, error);
    if (error == std::errc::no_such_file_or_directory) return names;
    if (error) throw_errno("listing", folder, error.value());
    for (const fs::directory_entry& entry : entries) {
      names.push_back(entry.path().filename().string() + (entry.is_directory(error) ? "/" : ""));
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  void remove(const fs::path& requested) override {
    const fs::path folder = resolved(requested);
    std::error_code error;
    const bool exists = fs::exists(folder, error);
    if (error) throw_errno("looking at", folder, error.value());
    if (!exists) return;
    check_target(folder, /*overwrite=*/true);
    const fs::path place = make_folder_beside(folder);
    if (::rename(folder.c_str(), place.c_str()) != 0) throw_errno("removing", folder);
    sync_folder(folder.parent_path());
    remove_tree(place);
  }

 private:
  static fs::path make_folder_beside(const fs::path& target) {
    std::random_device random;
    for (int attempt = 0; attempt < 100; ++attempt) {
      char suffix[20];
      std::snprintf(suffix, sizeof(suffix), "%08x%08x", random(), random());
      fs::path path = target.parent_path() / (staging_prefix(target) + suffix);
      if (::mkdir(path.c_str(), 0777) == 0) return path;
      if (errno != EEXIST) throw_errno("making the folder", path);
    }
    throw_errno("making a folder next to", target, EEXIST);
  }

  /// What saves of this target left behind when they were killed.
  static void clean_up(const fs::path& target) {
    std::error_code error;  // a folder that cannot be listed is cleaned by the next save that can
    std::vector<fs::path> found;
    for (const fs::directory_entry& entry : entries_of(target.parent_path(), error)) {
      if (entry.path().filename().string().rfind(staging_prefix(target), 0) == 0) found.push_back(entry.path());
    }
    for (const fs::path& path : found) {
      const int lock = try_lock(path);
      if (lock < 0) continue;  // of a save that runs
      const bool is_old = path.string().ends_with(kOldMark);
      if (is_old && !fs::exists(target, error)) {
        // Killed between the two renames of a file system that cannot swap.
        if (::rename(path.c_str(), target.c_str()) == 0) {
          FSDP2_LOG_WARN("[dcp] a save of ", target.string(), " was killed; its previous checkpoint is back");
        }
      } else {
        FSDP2_LOG_WARN("[dcp] removing ", path.string(), ", which a save that was killed left behind");
        remove_tree(path);
      }
      ::close(lock);
    }
  }

  void unlock(const std::string& place) noexcept {
    const std::lock_guard guard(mutex_);
    const auto found = locks_.find(place);
    if (found == locks_.end()) return;
    if (found->second >= 0) ::close(found->second);
    locks_.erase(found);
  }

  std::mutex mutex_;
  std::map<std::string, int> locks_;  // by place
};

}  // namespace

std::shared_ptr<Storage> local_storage() {
  static const auto& storage =
      *new std::shared_ptr<Storage>(std::make_shared<LocalStorage>());  // saves may outlive statics
  return storage;
}

}  // namespace fsdp2::dcp
