#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>

#include "dcp/checkpoint_files.h"
#include "dcp/flatten.h"

namespace fsdp2::dcp {

using namespace detail;

// Of the process that reads only: a save in the background is not waited for.
struct Reader::Impl {
  CheckpointFiles files;
  Value read(size_t entry) { return files.tensor(entry) ? Value(files.read_whole(entry)) : files.read_value(entry); }
};

Reader::Reader(const std::filesystem::path& path, const LoadOptions& options)
    : impl_(std::make_unique<Impl>(Impl{CheckpointFiles(options.storage, path, options.verify_checksums)})) {}
Reader::~Reader() = default;
Reader::Reader(Reader&&) noexcept = default;
Reader& Reader::operator=(Reader&&) noexcept = default;

const Metadata& Reader::metadata() const { return impl_->files.stored().metadata; }

Value Reader::read(const std::string& fqn) {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal_mode(false);
  const size_t entry = impl_->files.stored().find(fqn);
  FSDP2_CHECK(entry != StoredMetadata::npos, kNotFound, "[dcp] the checkpoint ", impl_->files.folder().string(),
              " has no key ", fqn);
  return impl_->read(entry);
}

StateDict Reader::read_all() {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal_mode(false);
  std::vector<std::pair<Path, Value>> leaves;
  for (size_t i = 0; i < metadata().entries.size(); ++i) {
    const std::string& fqn = metadata().entries[i].first;
    const auto path = metadata().paths.find(fqn);
    leaves.emplace_back(path == metadata().paths.end() ? Path{fqn} : path->second, impl_->read(i));
  }
  return unflatten(std::move(leaves));
}

}  // namespace fsdp2::dcp
