#include <fsdp2/dcp/storage.h>
#include <fsdp2/error.h>

#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace fsdp2::dcp {
namespace {

namespace fs = std::filesystem;
using File = std::shared_ptr<const std::string>;
using Folder = std::map<std::string, File>;

class MemoryInput final : public InputFile {
 public:
  MemoryInput(std::string name, File content) : name_(std::move(name)), content_(std::move(content)) {}
  const std::string& name() const override { return name_; }
  uint64_t size() const override { return content_->size(); }
  void read(uint64_t offset, void* out, size_t size) const override {
    FSDP2_CHECK(offset <= content_->size() && size <= content_->size() - offset, kCorruption, "[dcp] ", name_, " has ",
                content_->size(), " bytes; wanted are ", size, " at offset ", offset);
    if (size > 0) std::memcpy(out, content_->data() + offset, size);
  }

 private:
  std::string name_;
  File content_;
};

class MemoryStorage final : public Storage, public std::enable_shared_from_this<MemoryStorage> {
 public:
  std::string begin(const fs::path& target, bool overwrite) override {
    const std::lock_guard guard(mutex_);
    check(key_of(target), overwrite);
    std::string place = ".staging-" + std::to_string(++places_made_);
    folders_[place];
    return place;
  }
  bool sees(const std::string& place) override {
    const std::lock_guard guard(mutex_);
    return folders_.count(place) != 0;
  }
  std::unique_ptr<OutputFile> create(const std::string& place, const std::string& name) override {
    return std::make_unique<Output>(shared_from_this(), place, name);
  }
  void commit(const std::string& place, const fs::path& target, bool overwrite) override {
    const std::lock_guard guard(mutex_);
    check(key_of(target), overwrite);
    auto node = folders_.extract(place);
    FSDP2_CHECK(!node.empty(), kUsage, "[dcp] there is no place ", place, " to commit");
    folders_[key_of(target)] = std::move(node.mapped());
  }
  void clean(const std::string&, int, int) noexcept override {}
  void discard(const std::string& place) noexcept override {
    const std::lock_guard guard(mutex_);
    folders_.erase(place);
  }
  std::shared_ptr<const InputFile> open(const fs::path& folder, const std::string& name) override {
    const std::lock_guard guard(mutex_);
    const auto found = folders_.find(key_of(folder));
    const auto file = found == folders_.end() ? Folder::const_iterator{} : found->second.find(name);
    FSDP2_CHECK(found != folders_.end() && file != found->second.end(), kNotFound, "[dcp] the file ",
                (folder / name).string(), " of the checkpoint is missing");
    return std::make_shared<MemoryInput>((folder / name).string(), file->second);
  }
  std::vector<std::string> list(const fs::path& folder) override {
    const std::lock_guard guard(mutex_);
    std::set<std::string> names;
    const std::string own = key_of(folder);
    for (const auto& [path, files] : folders_) {
      if (path == own) {
        for (const auto& [name, content] : files) names.insert(name);
      } else if (path.size() > own.size() && path.compare(0, own.size() + 1, own + "/") == 0) {
        const std::string rest = path.substr(own.size() + 1);
        names.insert(rest.substr(0, rest.find('/')) + "/");
      }
    }
    return {names.begin(), names.end()};
  }
  void remove(const fs::path& folder) override {
    const std::lock_guard guard(mutex_);
    folders_.erase(key_of(folder));
  }

 private:
  class Output final : public OutputFile {
   public:
    Output(std::shared_ptr<MemoryStorage> storage, std::string place, std::string name)
        : storage_(std::move(storage)), place_(std::move(place)), name_(std::move(name)) {}
    void write(const void* data, size_t size) override { content_.append(static_cast<const char*>(data), size); }
    void finish() override {
      const std::lock_guard guard(storage_->mutex_);
      storage_->folders_.at(place_)[name_] = std::make_shared<const std::string>(std::move(content_));
    }

   private:
    std::shared_ptr<MemoryStorage> storage_;
    std::string place_, name_, content_;
  };

  static std::string key_of(const fs::path& path) {
    std::string key = path.lexically_normal().generic_string();
    while (key.size() > 1 && key.back() == '/') key.pop_back();
    return key;
  }
  void check(const std::string& target, bool overwrite) const {
    FSDP2_CHECK(overwrite || folders_.count(target) == 0, kInvalidArgument, "[dcp] cannot save to ", target,
                ": it holds a checkpoint; choose another path or set overwrite = true");
  }

  std::mutex mutex_;
  std::map<std::string, Folder> folders_;  // checkpoints by path, and places
  uint64_t places_made_ = 0;
};

}  // namespace

std::shared_ptr<Storage> make_memory_storage() { return std::make_shared<MemoryStorage>(); }

}  // namespace fsdp2::dcp
