#pragma once

// Where the time inside the library goes: exclusive wall time of the profiler ranges that it opens while somebody
// listens (names that begin with "FSDP::").

#include <ATen/record_function.h>

#include <map>
#include <string>

namespace bench {

/// Listens while it lives, on all threads; at most one at a time.
class RangeProfile {
 public:
  RangeProfile();
  ~RangeProfile();
  RangeProfile(const RangeProfile&) = delete;

  struct Range {
    double seconds = 0;  // without the ranges inside
    int64_t calls = 0;
  };
  /// Since construction or clear(), by name. No range may be open.
  std::map<std::string, Range> ranges() const;
  void clear();

 private:
  at::CallbackHandle handle_;
};

}  // namespace bench
