#include "dcp/file_system.h"

#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>

namespace fsdp2::dcp::detail {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBufferBytes = size_t{1} << 20;
constexpr const char* kStagingMark = ".staging-";

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

bool is_checkpoint_file(const std::string& name) {
  const auto ends_with = [&](std::string_view end) {
    return name.size() >= end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
  };
  if (name == ".metadata" || name == ".metadata.tmp") return true;
  return name.rfind("__", 0) == 0 && (ends_with(".distcp") || ends_with(".metadata") || ends_with(".metadata.tmp"));
}

}  // namespace

FileWriter::FileWriter(const fs::path& path) : path_(path) {
  file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file_ < 0) throw_errno("creating", path_);
  buffer_.reserve(kBufferBytes);
}
FileWriter::~FileWriter() {
  if (file_ >= 0) ::close(file_);
}

void FileWriter::put(const char* data, size_t size) {
  while (size > 0) {
    const ssize_t written = ::write(file_, data, std::min<size_t>(size, size_t{1} << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw_errno("writing", path_);
    data += written;
    size -= static_cast<size_t>(written);
  }
}
void FileWriter::flush() {
  put(buffer_.data(), buffer_.size());
  buffer_.clear();
}
void FileWriter::write(const void* data, size_t size) {
  position_ += size;
  const auto* bytes = static_cast<const char*>(data);
  if (buffer_.size() + size > kBufferBytes) flush();
  if (size >= kBufferBytes) {
    put(bytes, size);
  } else {
    buffer_.insert(buffer_.end(), bytes, bytes + size);
  }
}
void FileWriter::close() {
  flush();
  if (::fsync(file_) != 0) throw_errno("syncing", path_);
  const int file = file_;
  file_ = -1;
  if (::close(file) != 0) throw_errno("closing", path_);
}

void check_file_name(const std::string& name) {
  const bool plain = !name.empty() && name.size() <= 255 && name != "." && name != ".." &&
                     name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
  std::string shown = name.substr(0, 100);
  std::replace(shown.begin(), shown.end(), '\0', '?');
  FSDP2_CHECK(plain, kCorruption, "[dcp] the metadata point to the file '", shown,
              "', which is not a plain file name; files outside of the checkpoint folder are not read");
}

FileReader::FileReader(const fs::path& folder, const std::string& name) : name_((folder / name).string()) {
  check_file_name(name);
  file_ = ::open(name_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file_ < 0) {
    const int error = errno;
    FSDP2_CHECK(error != ENOENT, kNotFound, "[dcp] the file ", name_, " of the checkpoint is missing");
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
FileReader::~FileReader() { ::close(file_); }

void FileReader::read(uint64_t offset, void* out, size_t size) const {
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

void StagingFolder::check_target(const fs::path& target, bool overwrite) {
  std::error_code error;
  const fs::file_status status = fs::status(target, error);
  if (status.type() == fs::file_type::not_found) return;
  FSDP2_CHECK(status.type() == fs::file_type::directory, kInvalidArgument, "[dcp] cannot save to ", target.string(),
              ": it is not a folder");
  fs::directory_iterator entries(target, error);
  if (error) throw_errno("listing", target, error.value());
  for (const auto& entry : entries) {
    FSDP2_CHECK(overwrite, kInvalidArgument, "[dcp] cannot save to ", target.string(), ": the folder is not empty",
                fs::exists(target / ".metadata") ? " (it holds a checkpoint)" : "",
                "; choose another path or set overwrite = true");
    FSDP2_CHECK(is_checkpoint_file(entry.path().filename().string()), kInvalidArgument, "[dcp] cannot save to ",
                target.string(), ": it holds ", entry.path().filename().string(),
                ", which is not part of a checkpoint; overwriting replaces the whole folder, so "
                "choose another path");
  }
}

StagingFolder StagingFolder::create(const fs::path& requested, bool overwrite) {
  FSDP2_CHECK(!requested.empty(), kInvalidArgument, "[dcp] cannot save to an empty path");
  std::error_code error;
  fs::path target = fs::weakly_canonical(fs::absolute(requested), error);
  if (error) throw_errno("resolving", requested, error.value());
  if (target.filename().empty()) target = target.parent_path();  // "dir/"
  FSDP2_CHECK(target.has_filename(), kInvalidArgument, "[dcp] cannot save to ", target.string());
  check_target(target, overwrite);
  fs::create_directories(target.parent_path(), error);
  if (error) throw_errno("making the folder", target.parent_path(), error.value());
  std::random_device random;
  for (int attempt = 0; attempt < 100; ++attempt) {
    char suffix[20];
    std::snprintf(suffix, sizeof(suffix), "%08x%08x", random(), random());
    fs::path path = target.parent_path() / ("." + target.filename().string().substr(0, 200) + kStagingMark + suffix);
    if (::mkdir(path.c_str(), 0777) == 0) return StagingFolder(std::move(path), std::move(target), overwrite);
    if (errno != EEXIST) throw_errno("making the folder", path);
  }
  throw_errno("making a staging folder next to", target, EEXIST);
}

void StagingFolder::commit() {
  sync_folder(path_);
  check_target(target_, overwrite_);  // somebody may have been faster
  std::error_code error;
  if (!fs::exists(target_, error) || fs::is_empty(target_, error)) {
    if (::rename(path_.c_str(), target_.c_str()) != 0) throw_errno("renaming the finished checkpoint to", target_);
    sync_folder(target_.parent_path());
    return;
  }
  // Swaps both names in one step where the file system can; path_ is the old checkpoint then.
  constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE of linux/fs.h
  if (::syscall(SYS_renameat2, AT_FDCWD, path_.c_str(), AT_FDCWD, target_.c_str(), kExchange) == 0) {
    sync_folder(target_.parent_path());
    discard();
    return;
  }
  if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP)
    throw_errno("swapping in the finished checkpoint at", target_);
  const fs::path aside = path_.string() + "-old";
  if (::rename(target_.c_str(), aside.c_str()) != 0) throw_errno("moving the old checkpoint aside at", target_);
  if (::rename(path_.c_str(), target_.c_str()) != 0) {
    const int failure = errno;
    ::rename(aside.c_str(), target_.c_str());
    throw_errno("renaming the finished checkpoint to", target_, failure);
  }
  sync_folder(target_.parent_path());
  fs::remove_all(aside, error);
}

void StagingFolder::discard() noexcept {
  std::error_code error;
  fs::remove_all(path_, error);
  if (error) FSDP2_LOG_WARN("[dcp] could not remove ", path_.string(), ": ", error.message());
}

}  // namespace fsdp2::dcp::detail
