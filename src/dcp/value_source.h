#pragma once

// Where a set_ function takes its values from: the dict of this rank, or that of rank 0.

#include <fsdp2/dcp/state_dict.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dcp/exchange.h"

namespace fsdp2::dcp::detail {

/// Puts a value into its place. `own`: nobody else needs the value's memory, which may be taken over.
using PutTensor = std::function<void(const at::Tensor& value, bool own)>;

// Note [A dict from rank 0]
// Rank 0 sends the dict itself first, in which every tensor of more than one element is only a shape and a dtype; all
// ranks, rank 0 as well, then look at this dict with stand-ins on meta, so that all come to the same conclusions. What
// is wrong on any rank is exchanged before anything is changed. Then tensors travel in the order of the dict, those
// that some rank wants: every rank takes part in all of them, whatever its own model holds, and none waits for ever.
class ValueSource {
 public:
  /// `make` gives this rank's dict; with broadcast_from_rank0 it is called on rank 0 alone, and this is collective.
  ValueSource(const StateDictOptions& options, const std::function<StateDict()>& make);

  /// To look at. Collective steps follow: keep order and number of the calls below the same on all ranks.
  const StateDict& dict() const { return dict_; }
  /// kInvalidArgument naming `fqn` where a value has no data and is no stand-in.
  void check_has_data(const at::Tensor& value, const std::string& fqn) const;
  /// Asks for a tensor of dict().
  void want(const at::Tensor& value, PutTensor put) { wanted_.emplace_back(value, std::move(put)); }

  /// Runs `plan`, which throws where something is wrong and calls want(); an error on any rank is one on all.
  void agree(const std::function<void()>& plan);
  /// Brings every wanted tensor to its places.
  void deliver();

 private:
  void receive(const std::function<StateDict()>& make);

  StateDict dict_;
  bool may_take_over_;
  std::vector<std::pair<at::Tensor, PutTensor>> wanted_;

  // With broadcast only.
  std::optional<Exchange> exchange_;
  ProcessGroup group_;
  std::vector<at::Tensor> stand_ins_;  // in the order in which they travel
  std::vector<at::Tensor> real_;       // on rank 0
  std::string needed_;                 // one byte for each
};

/// A dict as bytes. Tensors of more than one element go to `tensors`, each once however often it is in the dict.
/// kInvalidArgument: a tensor that is not whole or has no data.
std::string encode(const StateDict& state, std::vector<at::Tensor>& tensors);
/// The reverse; `stand_ins` get the tensors on meta.
StateDict decode(const std::string& bytes, std::vector<at::Tensor>& stand_ins);

}  // namespace fsdp2::dcp::detail
