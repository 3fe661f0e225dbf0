#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include "dcp/geometry.h"
#include "dcp/item.h"
#include "dcp/tensor_source.h"

namespace fsdp2::dcp::detail {
namespace {

class TorchSaveSource final : public TensorSource {
 public:
  TorchSaveSource(const std::filesystem::path& path, bool verify) : TensorSource(Format::TorchSave), path_(path) {
    std::error_code error;
    const auto real = std::filesystem::canonical(path, error);  // links are fine where the user names the file
    FSDP2_CHECK(!error, kNotFound, "[dcp] cannot open ", path.string(), ": ", error.message());
    const auto file = local_storage()->open(real.parent_path(), real.filename().string());
    size_ = file->size();
    const Value root = read_value_item(ByteRange(file, 0, file->size(), "torch.save"), verify);
    FSDP2_CHECK(root.kind() != Kind::Opaque, kUnsupported, "[dcp] ", path.string(),
                " holds objects of classes that are not plain data (a whole module?); save its state_dict() instead");
    FSDP2_CHECK(root.kind() == Kind::Dict || root.kind() == Kind::OrderedDict, kInvalidArgument, "[dcp] ",
                path.string(), " holds a ", to_string(root.kind()), "; a checkpoint is a dict");
    state_ = root.dict();
    for (Leaf& leaf : flatten(state_, {})) {
      Item item{std::move(leaf.fqn), std::move(leaf.path), {}, 0};
      if (leaf.value->kind() == Kind::Tensor) {
        const at::Tensor& tensor = leaf.value->tensor();
        item.tensor = TensorEntry{tensor.scalar_type(), tensor.sizes().vec(), {whole_box(tensor.sizes().vec())}};
        item.bytes = tensor.nbytes();
      }
      values_.push_back(leaf.value);
      items_.push_back(std::move(item));
    }
  }

  at::Tensor read(size_t item, const Chunk& box) override {
    return part_of(storable(values_[item]->tensor(), items_[item].key), box).contiguous();
  }
  Value value(size_t item) override { return *values_[item]; }
  std::vector<std::string> files_of(size_t) const override { return {path_.filename().string()}; }
  void describe(CheckpointContents& info) const override { info.files.push_back({path_.filename().string(), size_}); }

 private:
  std::filesystem::path path_;
  uint64_t size_ = 0;
  StateDict state_;
  std::vector<Value*> values_;  // in state_
};

}  // namespace

std::unique_ptr<TensorSource> open_torch_save(const std::filesystem::path& file, bool verify) {
  return std::make_unique<TorchSaveSource>(file, verify);
}

}  // namespace fsdp2::dcp::detail
