#pragma once

// Ranges that profilers see. Nothing is built, and one thread-local is read, while none listens.

#include <ATen/record_function.h>

#include <optional>
#include <utility>

namespace fsdp2::detail {

/// `name` is a literal: "FSDP::hooks" and inside it "FSDP::all_gather", "FSDP::reduce" (both with their waits),
/// "FSDP::copies".
class ProfileRange {
 public:
  explicit ProfileRange(const char* name) {
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) [[unlikely]] {
      guard_.emplace(std::move(*callbacks)).before(name);
    }
  }

 private:
  std::optional<at::RecordFunction> guard_;
};

}  // namespace fsdp2::detail
