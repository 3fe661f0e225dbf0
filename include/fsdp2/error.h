#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <source_location>
#include <string>

#include <fsdp2/export.h>

namespace fsdp2 {

/// What kind of thing went wrong. The numbers are stable.
enum class ErrorCode {
  kInvalidArgument = 1,  ///< a value passed in is not allowed
  kNotFound = 2,         ///< a key, name, file or folder that should exist does not
  kCorruption = 3,       ///< a file contradicts itself or its checksum
  kUnsupported = 4,      ///< valid in PyTorch, not offered here (yet)
  kIo = 5,               ///< the operating system refused a read, write or rename
  kTimeout = 6,          ///< another rank did not come in time
  kPeerFailed = 7,       ///< another rank failed or closed its connection
  kCancelled = 8,        ///< stopped on request
  kUsage = 9,            ///< a rule of this library was broken, e.g. model->forward(x) on a sharded module
};

/// "kUsage" and so on, for logs and JSON.
FSDP2_API const char* to_string(ErrorCode code) noexcept;

/// The one exception type of the library. `what()` starts with the message (and, once a process
/// group exists, "[rank N]"); a backtrace follows only when TORCH_SHOW_CPP_STACKTRACES=1.
class FSDP2_API Error : public c10::Error {
 public:
  Error(ErrorCode code, const std::string& message,
        std::source_location where = std::source_location::current());
  Error(const Error&) = default;
  ~Error() override;

  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

namespace detail {
/// Rank shown in error and log lines; negative where there is no process group.
FSDP2_API void set_error_rank(int rank) noexcept;
FSDP2_API int error_rank() noexcept;
}  // namespace detail

}  // namespace fsdp2

/// Throws fsdp2::Error. Usage: FSDP2_THROW(kUsage, "[fsdp] ", fqn, " is sharded: ...").
#define FSDP2_THROW(code, ...) \
  throw ::fsdp2::Error(::fsdp2::ErrorCode::code, ::c10::str(__VA_ARGS__))

/// Throws fsdp2::Error unless `cond` holds.
#define FSDP2_CHECK(cond, code, ...)                 \
  do {                                               \
    if (!(cond)) [[unlikely]] {                      \
      FSDP2_THROW(code, __VA_ARGS__);                \
    }                                                \
  } while (false)
