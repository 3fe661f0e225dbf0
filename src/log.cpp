#include <fsdp2/log.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <string_view>

#include <fsdp2/error.h>

namespace fsdp2 {

namespace {

std::mutex sink_mutex;

std::function<void(LogLevel, const std::string&)>& sink() {
  static auto* function = new std::function<void(LogLevel, const std::string&)>();
  return *function;
}

LogLevel threshold() {
  static const LogLevel level = [] {
    const char* text = std::getenv("TORCH_CPP_LOG_LEVEL");
    const std::string_view value = text == nullptr ? "" : text;
    if (value == "INFO" || value == "0") return LogLevel::kInfo;
    if (value == "ERROR" || value == "2" || value == "FATAL" || value == "3") return LogLevel::kError;
    return LogLevel::kWarning;
  }();
  return level;
}

std::string timestamp() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%H:%M:%S", &local);
  return text.data();
}

}  // namespace

void log(LogLevel level, const std::string& text) noexcept {
  if (level < threshold()) {
    return;
  }
  try {
    static constexpr std::array<const char*, 3> kNames = {"INFO", "WARNING", "ERROR"};
    const int rank = detail::error_rank();
    const std::string who = rank < 0 ? "" : c10::str("[rank ", rank, "] ");
    const std::string line = c10::str(timestamp(), " ", kNames.at(static_cast<size_t>(level)), " ", who, text);
    const std::lock_guard lock(sink_mutex);
    if (sink()) {
      sink()(level, line);
    } else {
      std::fputs((line + "\n").c_str(), stderr);
    }
  } catch (...) {
    // A log line is never worth an exception, e.g. out of memory or a sink that throws.
  }
}

void set_log_sink(std::function<void(LogLevel, const std::string&)> new_sink) {
  const std::lock_guard lock(sink_mutex);
  sink() = std::move(new_sink);
}

}  // namespace fsdp2
