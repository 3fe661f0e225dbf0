// Whether a folder takes checkpoints, and how fast.

#include <fcntl.h>
#include <stdlib.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include <fsdp2/error.h>

#include "checkpoint/text.h"
#include "doctor/topic.h"

namespace fsdp2::tool {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kBytes = size_t{64} << 20, kBlock = size_t{4} << 20;
constexpr double kSeconds = 2;  // then writing stops early
constexpr uint64_t kFreeToMeasure = uint64_t{256} << 20, kLittleFree = uint64_t{1} << 30;
constexpr double kSlowWrite = 20e6, kSlowSync = 0.2;  // bytes a second, seconds

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// A file that has lost its name already: whatever ends this process, nothing stays.
class NamelessFile {
 public:
  explicit NamelessFile(const std::string& folder) {
    std::string path = folder + "/.fsdp2-doctor-XXXXXX";
    fd_ = mkostemp(path.data(), O_CLOEXEC);
    if (fd_ >= 0) unlink(path.c_str());
  }
  ~NamelessFile() {
    if (fd_ >= 0) close(fd_);
  }
  NamelessFile(const NamelessFile&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

void must(ssize_t result, const char* what) { FSDP2_CHECK(result >= 0, kIo, what, ": ", std::strerror(errno)); }

void write_all(int fd, const std::string& data, size_t bytes, size_t offset) {
  for (size_t done = 0; done < bytes;) {
    const size_t at = done % data.size();
    const ssize_t wrote =
        pwrite(fd, data.data() + at, std::min(data.size() - at, bytes - done), static_cast<off_t>(offset + done));
    if (wrote < 0 && errno == EINTR) continue;
    must(wrote, "write");
    done += static_cast<size_t>(wrote);
  }
}

struct Speed {
  double write = 0, read = 0;  // bytes a second
  double sync = 0;             // seconds of an fsync after 4 KiB
};

Speed measure(int fd) {
  // Noise, which a file system cannot compress.
  std::string data(kBlock, '\0');
  std::mt19937_64 random(1);
  for (size_t i = 0; i < data.size(); i += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(data.data() + i, &word, sizeof(word));
  }

  Speed speed;
  size_t bytes = 0;
  const auto start = Clock::now();
  while (bytes < kBytes && (bytes == 0 || since(start) < kSeconds)) {
    // After one quick block the rest comes in one go, so that the number is not that of many small syncs.
    const size_t step = bytes > 0 && since(start) < 0.25 ? kBytes - bytes : kBlock;
    write_all(fd, data, step, bytes);
    must(fsync(fd), "fsync");
    bytes += step;
  }
  speed.write = static_cast<double>(bytes) / since(start);

  constexpr int kSyncs = 5;
  const auto sync_start = Clock::now();
  int syncs = 0;
  for (; syncs < kSyncs && since(sync_start) < 1; ++syncs) {
    write_all(fd, data, 4096, 0);
    must(fsync(fd), "fsync");
  }
  speed.sync = since(sync_start) / syncs;

  posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);  // only a wish
  const auto read_start = Clock::now();
  for (size_t offset = 0; offset < bytes;) {
    const ssize_t got = pread(fd, data.data(), data.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    must(got, "read");
    if (got == 0) break;
    offset += static_cast<size_t>(got);
  }
  speed.read = static_cast<double>(bytes) / since(read_start);
  return speed;
}

/// By the longest mount point that the folder is under.
std::string file_system(const std::string& folder) {
  std::ifstream mounts("/proc/self/mountinfo");
  std::string longest, type;
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream words(line);
    std::string id, parent, device, root, point, word, name;
    words >> id >> parent >> device >> root >> point;
    while (words >> word && word != "-") {
    }
    words >> name;
    const bool under = point == "/" || folder == point || folder.starts_with(point + "/");
    if (under && point.size() >= longest.size()) longest = point, type = name;
  }
  return type;
}

std::string rate_text(double bytes_per_second) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.0f MB/s", bytes_per_second / 1e6);
  return text;
}

void check_speed(const std::string& folder, Topic& topic) {
  const NamelessFile file(folder);
  if (file.fd() < 0) {
    topic.find(Severity::kError, "folder-not-writable", "cannot make a file in " + folder + ": " + std::strerror(errno),
               "choose another --folder, or make this one writable for this user (ls -ld, mount)");
    return;
  }
  Speed speed;
  try {
    speed = measure(file.fd());
  } catch (const Error& error) {
    topic.find(Severity::kError, "folder-not-writable",
               "writing to " + folder + " fails: " + error.what_without_backtrace(),
               "look at free space and quota (df, quota) and at ulimit -f");
    return;
  }
  char sync[40];
  std::snprintf(sync, sizeof(sync), "%.2f ms", speed.sync * 1e3);
  topic.fact("write_bytes_per_s", speed.write, "write + fsync", rate_text(speed.write));
  topic.fact("read_bytes_per_s", speed.read, "read", rate_text(speed.read) + " (the page cache may help)");
  topic.fact("fsync_s", speed.sync, "fsync", sync);
  if (speed.write < kSlowWrite || speed.sync > kSlowSync) {
    topic.find(
        Severity::kWarning, "folder-slow",
        folder + " writes " + rate_text(speed.write) + " and takes " + sync + " for an fsync: checkpoints wait for it",
        "write checkpoints to a faster folder, or save with dcp::async_save and copy them in the background");
  }
}

}  // namespace

void check_folder(const DoctorOptions& options, Topic& topic) {
  namespace fs = std::filesystem;
  std::error_code error;
  const std::string folder = fs::canonical(options.folder, error).string();
  topic.fact("path", error ? options.folder : folder, "folder", error ? options.folder : folder);
  topic.fact("measured", options.benchmarks);
  if (error || !fs::is_directory(folder)) {
    topic.find(Severity::kError, "folder-missing",
               "--folder " + options.folder + ": " + (error ? error.message() : "it is a file, not a folder"),
               "mkdir -p it, mount it, or name another one");
    return;
  }
  struct statvfs space {};
  must(statvfs(folder.c_str(), &space), "statvfs");
  const uint64_t free_bytes = uint64_t{space.f_bavail} * space.f_frsize;
  const std::string type = file_system(folder);
  topic.fact("file_system", type);
  topic.fact("free", free_bytes, "space", bytes_text(free_bytes) + " free, " + type);
  const bool writable = access(folder.c_str(), W_OK | X_OK) == 0;
  if (!writable) {
    topic.find(Severity::kError, "folder-not-writable",
               "this user cannot write to " + folder + ": " + std::strerror(errno),
               "choose another --folder, or make this one writable for this user (ls -ld, mount)");
    return;
  }
  if (type == "tmpfs") {
    topic.find(Severity::kNote, "folder-in-memory",
               folder + " lies in memory (tmpfs): checkpoints are gone after a restart",
               "name a folder on a disk or a network file system");
  }
  const bool full = free_bytes < kFreeToMeasure;
  if (options.benchmarks && !(full && free_bytes > 0)) check_speed(folder, topic);
  if (free_bytes < kLittleFree && free_bytes > 0) {
    topic.find(Severity::kWarning, "folder-full",
               folder + " has " + bytes_text(free_bytes) + " free" +
                   (full && options.benchmarks ? "; too little to measure it" : ""),
               "remove old checkpoints, or name another folder");
  }
}

}  // namespace fsdp2::tool
