#pragma once

// A rank's model in words and hashes, to be compared with another's.

#include <string>
#include <vector>

#include "diagnose/subject.h"

namespace fsdp2::detail::diagnose {

struct Manifest {
  struct Entry {
    std::string fqn;
    std::string text;    // shape, dtype, ...: the same on every rank
    std::string place;   // of this rank's part in the whole; parts at one place have equal values. Empty: not compared
    std::string values;  // a hash; empty where they were not looked at
    bool has_gradient = false;
  };
  std::vector<Entry> params, buffers;
  std::vector<std::string> groups;  // what each has, in order
  std::vector<int> peers;           // global ranks of all meshes, sorted
  Findings findings;                // of this rank alone

  std::string encode() const;
  static Manifest decode(const std::string& text);
};

Manifest manifest_of(const Subject& subject, const Findings& own);

/// 63 bits, so that no sign gets in the way.
int64_t hash_of(const std::string& text);

}  // namespace fsdp2::detail::diagnose
