#pragma once

// Keys that a checkpoint lacks: which of them matter.

#include <functional>
#include <string>
#include <vector>

#include "dcp/flatten.h"

namespace fsdp2::dcp::detail {

/// The first ten, and how many more there are.
std::string some_of(const std::vector<std::string>& names);

/// Collects the keys of a target in order; keys that the options of a load allow to be missing are not added.
class Absences {
 public:
  void add_found(const Leaf& leaf);
  void add_missing(const Leaf& leaf);
  /// kNotFound naming the keys whose absence is an error. `folder` is the checkpoint's; `saved_by_rank` says whether a
  /// key was saved once for each rank.
  void check(const std::string& folder, const std::function<bool(const std::string&)>& saved_by_rank) const;
  /// Takes what was not saved out of the dicts that say so, with a note in the log.
  void settle();

 private:
  struct Dict {
    StateDict* dict;
    std::string found, missing;  // the first key of each kind
  };
  /// The entry of a leaf's dict; leaves of one dict come one after the other.
  Dict& dict_of(const Leaf& leaf);

  std::vector<std::string> errors_;
  std::vector<Leaf> dropped_;
  std::vector<Dict> dicts_;  // those that say kAllOrNone
};

}  // namespace fsdp2::dcp::detail
