#pragma once

// Ranges that profilers see. Nothing is built, and one thread-local is read, while none listens.

#include <ATen/record_function.h>

namespace fsdp2::detail {

/// `name` is a literal: "FSDP::hooks" and inside it "FSDP::all_gather", "FSDP::reduce" (both with their waits),
/// "FSDP::copies".
class ProfileRange {
 public:
  explicit ProfileRange(const char* name) : guard_(at::RecordScope::USER_SCOPE) {
    if (guard_.isActive()) guard_.before(name);
  }

 private:
  at::RecordFunction guard_;
};

}  // namespace fsdp2::detail
