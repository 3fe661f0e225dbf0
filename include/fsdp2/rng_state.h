#pragma once

// Random number generators in a checkpoint. Python twin: torch.get_rng_state, torch.cuda.get_rng_state.

#include <fsdp2/dcp/value.h>
#include <fsdp2/export.h>

namespace fsdp2 {

/// The default generators of this process: "cpu", and "cuda" where local_device() is one. Each is a uint8 tensor in
/// the format of torch.get_rng_state() and torch.cuda.get_rng_state(), which Python reads and writes too.
///
/// Ranks draw different numbers (dropout masks), so each saves its own:
///
///     state["rng"] = fsdp2::dcp::per_rank(std::make_shared<fsdp2::RngState>());
///
/// A resumed run draws the numbers that the interrupted one would have drawn. Ranks that the saving run did not have
/// miss their key: seed them, and load with allow_missing = {"rng.*"}.
class FSDP2_API RngState : public dcp::Stateful {
 public:
  dcp::StateDict state_dict() override;
  /// kNotFound naming a missing key; kInvalidArgument: a state that is not a uint8 tensor of the generator's size, or
  /// one that the generator refuses. No generator is changed unless all take theirs.
  void load_state_dict(const dcp::StateDict& state) override;
};

}  // namespace fsdp2
