#include <fsdp2/error.h>

#include <c10/util/Backtrace.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace fsdp2 {

namespace {

std::atomic<int> rank_for_errors{-1};

std::string with_rank(const std::string& message) {
  const int rank = detail::error_rank();
  return rank < 0 ? message : c10::str("[rank ", rank, "] ", message);
}

c10::Backtrace backtrace_if_asked(const std::source_location& where) {
  const char* wanted = std::getenv("TORCH_SHOW_CPP_STACKTRACES");
  if (wanted == nullptr || std::strcmp(wanted, "1") != 0) {
    return nullptr;
  }
  return std::make_shared<c10::PrecomputedLazyValue<std::string>>(
      c10::str("\nRaised at ", where.file_name(), ":", where.line(), "\n", c10::get_backtrace(1)));
}

}  // namespace

const char* to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "kInvalidArgument";
    case ErrorCode::kNotFound: return "kNotFound";
    case ErrorCode::kCorruption: return "kCorruption";
    case ErrorCode::kUnsupported: return "kUnsupported";
    case ErrorCode::kIo: return "kIo";
    case ErrorCode::kTimeout: return "kTimeout";
    case ErrorCode::kPeerFailed: return "kPeerFailed";
    case ErrorCode::kCancelled: return "kCancelled";
    case ErrorCode::kUsage: return "kUsage";
  }
  return "unknown";
}

Error::Error(ErrorCode code, const std::string& message, std::source_location where)
    : c10::Error(with_rank(message), backtrace_if_asked(where)), code_(code) {}

Error::~Error() = default;

namespace detail {
void set_error_rank(int rank) noexcept { rank_for_errors.store(rank, std::memory_order_relaxed); }
int error_rank() noexcept { return rank_for_errors.load(std::memory_order_relaxed); }
}  // namespace detail

}  // namespace fsdp2
