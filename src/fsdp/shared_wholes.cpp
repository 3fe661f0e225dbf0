#include "fsdp/shared_wholes.h"

#include <ATen/Functions.h>

#include <cstring>

#include <fsdp2/error.h>

namespace fsdp2::detail {

// Note [Parameters in shared memory]
// On the shm backend the whole parameters of a group lie in one mapping of all ranks, each whole in one piece, for
// good. The shards of the ranks are their rows of it, so that an optimizer's step is at once where the others read it
// (with another computation dtype the mapping holds copies that each rank casts of its own shard). Gathering is then no
// copy and no message: the parameter is shown over the mapping. What remains of the all-gather is its order in time:
//
//   a rank must not read before all ranks have written: a barrier at the beginning of the root's forward and of
//   backward (TrainingContext::publish);
//   a rank must not write before all ranks have read: a barrier at the end of the root's forward; in backward the
//   reduction of the group's gradients, which every rank enters after its last use of the parameters; a barrier at
//   the end of backward for groups that had none.
//
// So parameters are shown in place only between these; those that stay whole after a backward, or after a forward
// without one, become copies. What stays whole from forward to its backward is still the mapping. unshard() at any
// other time copies out of it, with a barrier before and after, as an all-gather would. A shard that is written in
// between is an error: other ranks may have seen it half written.

namespace {

constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

using MemoryHolder = std::shared_ptr<shm::SharedMemory>;

void release_holder(void* context) { delete static_cast<MemoryHolder*>(context); }

}  // namespace

Tensor own_storage(const Tensor& view) {
  auto* memory = new Tensor(view);
  return at::from_blob(
      view.data_ptr(), view.sizes(), [memory](void*) { delete memory; }, view.options());
}

SharedWholes::SharedWholes(shm::ShmBackend& backend, std::vector<FSDPParam>& params,
                           const std::vector<at::ScalarType>& dtypes, const std::string& label) {
  const int ranks = backend.getSize(), rank = backend.getRank();
  size_t bytes = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    Place& place = places_.emplace_back();
    place.offset = bytes;
    place.dtype = dtypes[i];
    place.cast = dtypes[i] != params[i].orig_dtype();
    bytes += aligned(static_cast<size_t>(params[i].padded_numel() * ranks) * c10::elementSize(dtypes[i]));
  }
  memory_ = backend.make_memory(bytes, label.c_str());
  for (size_t i = 0; i < params.size(); ++i) {
    Place& place = places_[i];
    const Tensor& local = params[i].local();
    const size_t own_bytes = static_cast<size_t>(params[i].padded_numel()) * c10::elementSize(place.dtype);
    std::byte* mine = memory_->data() + place.offset + static_cast<size_t>(rank) * own_bytes;
    if (place.cast) {
      place.mine = at::from_blob(mine, local.sizes(), at::TensorOptions(place.dtype));
      continue;
    }
    if (local.nbytes() > 0) std::memcpy(mine, local.const_data_ptr(), local.nbytes());
    local.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
        c10::DataPtr(mine, new MemoryHolder(memory_), &release_holder, c10::Device(at::kCPU)));
  }
}

void SharedWholes::publish(const std::vector<FSDPParam>& params, bool only_changed) {
  for (size_t i = 0; i < params.size(); ++i) {
    Place& place = places_[i];
    const Tensor& local = params[i].local();
    const uint32_t version = local._version();
    if (place.cast && !(only_changed && version == place.version)) {
      place.mine.copy_(local);
    }
    place.version = version;
  }
}

void SharedWholes::check_unwritten(const std::vector<FSDPParam>& params) const {
  for (size_t i = 0; i < params.size(); ++i) {
    FSDP2_CHECK(params[i].local()._version() == places_[i].version, kUsage, "[fsdp] sharded parameter ",
                params[i].fqn(),
                " was written inside forward or backward, where other ranks read it from shared memory: they may have "
                "seen old or new values. Write before the root's forward or after backward, or set "
                "FSDP2_SHM_IN_PLACE=0, which makes every rank gather a copy");
  }
}

}  // namespace fsdp2::detail
