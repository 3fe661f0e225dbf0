#pragma once

#include <functional>
#include <string>

#include <c10/util/StringUtil.h>

#include <fsdp2/export.h>

namespace fsdp2 {

enum class LogLevel { kInfo = 0, kWarning = 1, kError = 2 };

/// Writes one line to stderr, or to the sink: time, level, "[rank N]", text. Lines below the level of
/// TORCH_CPP_LOG_LEVEL (INFO, WARNING, ERROR; default WARNING) are dropped. Never throws.
FSDP2_API void log(LogLevel level, const std::string& text) noexcept;

/// Replaces stderr by a function of the user's (an empty one restores stderr).
FSDP2_API void set_log_sink(std::function<void(LogLevel, const std::string&)> sink);

}  // namespace fsdp2

#define FSDP2_LOG_INFO(...) ::fsdp2::log(::fsdp2::LogLevel::kInfo, ::c10::str(__VA_ARGS__))
#define FSDP2_LOG_WARN(...) ::fsdp2::log(::fsdp2::LogLevel::kWarning, ::c10::str(__VA_ARGS__))
#define FSDP2_LOG_ERROR(...) ::fsdp2::log(::fsdp2::LogLevel::kError, ::c10::str(__VA_ARGS__))
/// Once per call site and process.
#define FSDP2_LOG_WARN_ONCE(...)                              \
  do {                                                        \
    static const bool once = (FSDP2_LOG_WARN(__VA_ARGS__), true); \
    (void)once;                                               \
  } while (false)
