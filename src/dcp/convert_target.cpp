#include <fsdp2/error.h>

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>

#include "dcp/convert_output.h"

namespace fsdp2::dcp::detail {
namespace {

namespace fs = std::filesystem;

class FolderTarget final : public ConvertTarget {
 public:
  FolderTarget(const fs::path& destination, bool overwrite)
      : storage_(local_storage()),
        destination_(destination),
        overwrite_(overwrite),
        place_(storage_->begin(destination, overwrite)) {}
  ~FolderTarget() override {
    if (!committed_) storage_->discard(place_);
  }
  fs::path path() const override { return place_; }
  std::unique_ptr<OutputFile> create(const std::string& name) override { return storage_->create(place_, name); }
  void commit() override {
    storage_->commit(place_, destination_, overwrite_);
    committed_ = true;
    storage_->clean(place_, /*rank=*/0, /*world_size=*/1);  // the checkpoint that was replaced lies there now
  }

 private:
  std::shared_ptr<Storage> storage_;
  fs::path destination_;
  bool overwrite_;
  std::string place_;
  bool committed_ = false;
};

/// Makes the names in a folder durable, where that works: what they name is durable already, and will be found soon.
void sync_folder(const fs::path& path) {
  const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  ::fsync(folder);
  ::close(folder);
}

class FileTarget final : public ConvertTarget {
 public:
  FileTarget(const fs::path& destination, bool overwrite) : overwrite_(overwrite) {
    std::error_code error;
    destination_ = fs::absolute(destination, error);
    FSDP2_CHECK(!error, kIo, "[dcp] resolving ", destination.string(), " failed: ", error.message());
    const fs::file_status status = fs::symlink_status(destination_, error);
    FSDP2_CHECK(status.type() != fs::file_type::none, kIo, "[dcp] looking at ", destination_.string(),
                " failed: ", error.message());
    if (fs::exists(status)) {
      FSDP2_CHECK(fs::is_regular_file(status), kInvalidArgument, "[dcp] cannot write ", destination_.string(),
                  ": it is not a regular file");
      FSDP2_CHECK(overwrite, kInvalidArgument, "[dcp] cannot write ", destination_.string(),
                  ": it is there already; choose another path or set overwrite = true");
    }
    for (fs::path path = destination_.parent_path(); path.has_relative_path() && !fs::exists(path, error);
         path = path.parent_path())
      changed_folders_.push_back(path.parent_path());
    fs::create_directories(destination_.parent_path(), error);
    FSDP2_CHECK(!error, kIo, "[dcp] making the folder ", destination_.parent_path().string(),
                " failed: ", error.message());
    char suffix[20];
    std::random_device random;
    std::snprintf(suffix, sizeof(suffix), "%08x%08x", random(), random());
    staged_ =
        destination_.parent_path() / ("." + destination_.filename().string().substr(0, 200) + ".staging-" + suffix);
  }
  ~FileTarget() override {
    std::error_code ignored;  // a leftover with "staging" in its name is all that can remain
    fs::remove(staged_, ignored);
  }
  fs::path path() const override { return staged_; }
  std::unique_ptr<OutputFile> create(const std::string&) override {
    return local_storage()->create(staged_.parent_path().string(), staged_.filename().string());
  }
  void commit() override {
    constexpr unsigned kNoReplace = 1;  // RENAME_NOREPLACE of linux/fs.h
    int result = -1;
    if (!overwrite_) {
      result = static_cast<int>(
          ::syscall(SYS_renameat2, AT_FDCWD, staged_.c_str(), AT_FDCWD, destination_.c_str(), kNoReplace));
    }
    if (result != 0 && (overwrite_ || errno == EINVAL || errno == ENOSYS))
      result = ::rename(staged_.c_str(), destination_.c_str());
    FSDP2_CHECK(result == 0, kIo, "[dcp] renaming the finished file to ", destination_.string(),
                " failed: ", std::strerror(errno));
    sync_folder(destination_.parent_path());
    for (const fs::path& folder : changed_folders_) sync_folder(folder);
  }

 private:
  fs::path destination_, staged_;
  std::vector<fs::path> changed_folders_;  // those above its own one in which one was made
  bool overwrite_;
};

}  // namespace

std::unique_ptr<ConvertTarget> make_folder_target(const fs::path& destination, bool overwrite) {
  return std::make_unique<FolderTarget>(destination, overwrite);
}
std::unique_ptr<ConvertTarget> make_file_target(const fs::path& destination, bool overwrite) {
  return std::make_unique<FileTarget>(destination, overwrite);
}

}  // namespace fsdp2::dcp::detail
