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
  }

 private:
  std::shared_ptr<Storage> storage_;
  fs::path destination_;
  bool overwrite_;
  std::string place_;
  bool committed_ = false;
};

class FileTarget final : public ConvertTarget {
 public:
  FileTarget(const fs::path& destination, bool overwrite)
      : destination_(fs::absolute(destination)), overwrite_(overwrite) {
    std::error_code error;
    const fs::file_status status = fs::symlink_status(destination_, error);
    if (fs::exists(status)) {
      FSDP2_CHECK(fs::is_regular_file(status), kInvalidArgument, "[dcp] cannot write ", destination_.string(),
                  ": it is not a regular file");
      FSDP2_CHECK(overwrite, kInvalidArgument, "[dcp] cannot write ", destination_.string(),
                  ": it is there already; choose another path or set overwrite = true");
    }
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
    const int folder = ::open(destination_.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return;  // the file itself is durable, its name will be soon
    ::fsync(folder);
    ::close(folder);
  }

 private:
  fs::path destination_, staged_;
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
