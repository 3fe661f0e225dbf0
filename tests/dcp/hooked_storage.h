#pragma once

// A storage that calls a function of the test before each of its operations: to count, to fail, to kill the process.

#include <fsdp2/dcp/storage.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp2::testing {

/// "begin", "write" and so on, with the file or folder that it is about.
using StorageHook = std::function<void(const std::string& operation, const std::string& name)>;

class HookedStorage final : public dcp::Storage {
 public:
  explicit HookedStorage(StorageHook hook, std::shared_ptr<dcp::Storage> inner = dcp::local_storage())
      : hook_(std::move(hook)), inner_(std::move(inner)) {}

  std::string begin(const std::filesystem::path& target, bool overwrite) override {
    hook_("begin", target.string());
    return inner_->begin(target, overwrite);
  }
  bool sees(const std::string& place) override {
    hook_("sees", place);
    return inner_->sees(place);
  }
  std::unique_ptr<dcp::OutputFile> create(const std::string& place, const std::string& name) override {
    hook_("create", name);
    return std::make_unique<Output>(hook_, name, inner_->create(place, name));
  }
  void commit(const std::string& place, const std::filesystem::path& target, bool overwrite) override {
    hook_("commit", target.string());
    inner_->commit(place, target, overwrite);
    hook_("committed", target.string());
  }
  void clean(const std::string& place, int rank, int world_size) noexcept override {
    hook_("clean", place);
    inner_->clean(place, rank, world_size);
  }
  void discard(const std::string& place) noexcept override { inner_->discard(place); }
  std::shared_ptr<const dcp::InputFile> open(const std::filesystem::path& folder, const std::string& name) override {
    hook_("open", (folder / name).string());
    return std::make_shared<Input>(hook_, inner_->open(folder, name));
  }
  std::vector<std::string> list(const std::filesystem::path& folder) override {
    hook_("list", folder.string());
    return inner_->list(folder);
  }
  void remove(const std::filesystem::path& folder) override {
    hook_("remove", folder.string());
    inner_->remove(folder);
    hook_("removed", folder.string());
  }

 private:
  class Output final : public dcp::OutputFile {
   public:
    Output(StorageHook hook, std::string name, std::unique_ptr<dcp::OutputFile> inner)
        : hook_(std::move(hook)), name_(std::move(name)), inner_(std::move(inner)) {}
    void write(const void* data, size_t size) override {
      hook_("write", name_);
      inner_->write(data, size);
    }
    void finish() override {
      hook_("finish", name_);
      inner_->finish();
      hook_("finished", name_);
    }

   private:
    StorageHook hook_;
    std::string name_;
    std::unique_ptr<dcp::OutputFile> inner_;
  };
  class Input final : public dcp::InputFile {
   public:
    Input(StorageHook hook, std::shared_ptr<const dcp::InputFile> inner)
        : hook_(std::move(hook)), inner_(std::move(inner)) {}
    const std::string& name() const override { return inner_->name(); }
    uint64_t size() const override { return inner_->size(); }
    void read(uint64_t offset, void* out, size_t size) const override {
      hook_("read", name());
      inner_->read(offset, out, size);
    }

   private:
    StorageHook hook_;
    std::shared_ptr<const dcp::InputFile> inner_;
  };

  StorageHook hook_;
  std::shared_ptr<dcp::Storage> inner_;
};

}  // namespace fsdp2::testing
