#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "dcp/checkpoint_files.h"
#include "dcp/file_writer.h"
#include "dcp/geometry.h"

namespace fsdp2::dcp {
namespace {

using namespace detail;

class Verifier {
 public:
  using Progress = std::function<void(uint64_t, uint64_t)>;

  Verifier(const std::filesystem::path& path, const LoadOptions& options, const Progress& progress)
      : path_(path), options_(options), progress_(progress), storage_(or_local(options.storage)) {}

  VerifyReport run() {
    std::optional<CheckpointFiles> files;
    attempt(kMetadataName, "", 0, [&] { files.emplace(storage_, path_, options_.verify_checksums); });
    if (!files) return std::move(report_);
    report_.has_checksums = files->checksums() != nullptr;
    const StoredMetadata& stored = files->stored();
    for (const auto& places : stored.locations) {
      for (const ItemLocation& place : places) total_ += place.length;
    }
    for (size_t i = 0; i < stored.metadata.entries.size(); ++i) check_entry(*files, i);
    check_files(*files);
    return std::move(report_);
  }

 private:
  /// Runs `work`; an error of it is a fault of the checkpoint, unless there is none at all.
  template <class Work>
  void attempt(const std::string& file, const std::string& key, uint64_t offset, const Work& work) {
    try {
      work();
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kNotFound && key.empty() && storage_->list(path_).empty()) throw;
      report_.faults.push_back({file, key, offset, std::string(error.what_without_backtrace())});
    }
  }

  void check_entry(CheckpointFiles& files, size_t entry) {
    const auto& places = files.stored().locations[entry];
    const TensorEntry* tensor = files.tensor(entry);
    if (tensor != nullptr) attempt(kMetadataName, files.fqn(entry), 0, [&] { files.check_tensor(entry); });
    for (size_t part = 0; part < places.size(); ++part) {
      const ItemLocation& place = places[part];
      used_.insert(place.file);
      ++report_.items;
      report_.bytes += place.length;
      attempt(place.file, files.fqn(entry), place.offset, [&] {
        const bool empty_chunk = tensor != nullptr && *checked_numel(tensor->chunks[part].sizes) == 0;
        if (empty_chunk && !place.present) return;
        if (tensor != nullptr) files.check_chunk(entry, part);
        files.check_item(entry, part);
      });
      if (progress_) progress_(report_.bytes, total_);
    }
  }

  void check_files(CheckpointFiles& files) {
    for (const std::string& name : storage_->list(path_)) {
      if (name.ends_with(kMetadataName) || name == kChecksumsName) {
        ++report_.files;
        continue;
      }
      const Checksums* sums = files.checksums();
      // Ranks without anything to write leave empty files.
      const bool ours = sums != nullptr && sums->has_file(name);
      if (!used_.count(name) && !ours) {
        if (is_empty(name)) continue;
        report_.unreferenced.push_back(name);
        continue;
      }
      ++report_.files;
      if (!ours) continue;
      attempt(name, "", 0, [&] {
        const uint64_t size = storage_->open(path_, name)->size(), recorded = sums->file_size(name);
        FSDP2_CHECK(size == recorded, kCorruption, "[dcp] ", (path_ / name).string(), " has ", size,
                    " bytes; it was written with ", recorded);
      });
    }
  }

  bool is_empty(const std::string& name) {
    return !name.ends_with('/') && is_checkpoint_file(name) && storage_->open(path_, name)->size() == 0;
  }

  std::filesystem::path path_;
  const LoadOptions& options_;
  const Progress& progress_;
  std::shared_ptr<Storage> storage_;
  uint64_t total_ = 0;
  VerifyReport report_;
  std::set<std::string> used_;
};

}  // namespace

VerifyReport verify(const std::filesystem::path& path, const LoadOptions& options,
                    const std::function<void(uint64_t, uint64_t)>& progress) {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal_mode(false);
  return Verifier(path, options, progress).run();
}

}  // namespace fsdp2::dcp
