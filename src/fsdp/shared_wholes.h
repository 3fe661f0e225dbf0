#pragma once

// The whole parameters of a group in memory that all ranks map. Note [Parameters in shared memory] in the .cpp.

#include <memory>
#include <string>
#include <vector>

#include "backend/shm/shm_backend.h"
#include "fsdp/fsdp_param.h"

namespace fsdp2::detail {

class SharedWholes {
 public:
  /// One entry per parameter, `dtypes` as forward sees them. Moves shards that need no cast to their place in the
  /// mapping, under every tensor that aliases them; their storages must be made by own_storage(). Collective.
  SharedWholes(shm::ShmBackend& backend, std::vector<FSDPParam>& params, const std::vector<at::ScalarType>& dtypes,
               const std::string& label);

  /// Puts what this rank holds where others read it; a barrier must follow. `only_changed`: shards that nobody wrote
  /// through a tensor since the last time keep their cast copies.
  void publish(const std::vector<FSDPParam>& params, bool only_changed);
  /// Throws kUsage where a shard was written after publish(): others may have read it before or after.
  void check_unwritten(const std::vector<FSDPParam>& params) const;

  void* data_of(size_t param) const { return memory_->data() + places_[param].offset; }
  at::ScalarType dtype_of(size_t param) const { return places_[param].dtype; }

 private:
  struct Place {
    size_t offset = 0;  // of the whole
    at::ScalarType dtype{};
    bool cast = false;     // the shard lives elsewhere; here is a copy in another dtype
    uint32_t version = 0;  // of the shard, when published
    Tensor mine;           // where `cast`: this rank's rows
  };
  std::shared_ptr<shm::SharedMemory> memory_;
  std::vector<Place> places_;
};

/// The same memory under a storage of its own, which can be moved.
Tensor own_storage(const Tensor& view);

}  // namespace fsdp2::detail
