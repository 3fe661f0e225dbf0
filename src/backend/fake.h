#pragma once

// One rank of a group of any size, without the others. Public side: fsdp2/fake_backend.h, which says what
// collectives give.

#include <fsdp2/process_group.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

namespace fsdp2::detail::fake_backend {

/// Nobody else ever writes to it.
c10::intrusive_ptr<c10d::Store> make_store();
/// A group of its own backend on every device, the meta device included.
ProcessGroup make_group(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank, int size);
/// Also false for an empty one.
bool is_fake(const ProcessGroup& group);

}  // namespace fsdp2::detail::fake_backend
