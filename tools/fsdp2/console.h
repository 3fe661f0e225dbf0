#pragma once

// Lines of many ranks on one console: whole lines only, each with its rank in front.

#include <cstdio>
#include <deque>
#include <memory>
#include <string>
#include <string_view>

namespace fsdp2::tool {

/// One of our own output streams. Never blocks: what the reader does not take yet waits in memory.
class OutputQueue {
 public:
  explicit OutputQueue(int fd);
  /// Appends "prefix text\n".
  void line(std::string_view prefix, std::string_view text);
  /// On a terminal: shows `text` in place of the last update, as a progress bar does.
  void update(std::string_view prefix, std::string_view text);
  /// Writes what can be written now.
  void flush_some();
  /// Flushes for at most `seconds`.
  void flush(double seconds);
  bool is_terminal() const { return terminal_; }
  bool empty() const { return pending_.size() == written_; }
  bool full() const { return pending_.size() - written_ > (1u << 20); }
  /// The reader went away; text is dropped from now on.
  bool broken() const { return broken_; }
  int fd() const { return fd_; }

 private:
  void end_update();
  int fd_;
  bool terminal_, broken_ = false, update_shown_ = false;
  std::string pending_;
  size_t written_ = 0;
};

/// One stream of one rank, cut into lines.
class RankStream {
 public:
  /// `fd` is owned. `console` may be null (hidden or redirected), `log_path` empty (no file).
  RankStream(int fd, std::string prefix, OutputQueue* console, const std::string& log_path);
  ~RankStream();
  RankStream(const RankStream&) = delete;
  RankStream& operator=(const RankStream&) = delete;
  /// Reads what is there now.
  void pump();
  /// Shows a last line without a newline, and closes.
  void finish();
  bool open() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  const OutputQueue* console() const { return console_; }
  /// The last line that was not blank.
  const std::string& last_line() const { return last_line_; }

 private:
  void cut_lines();
  void emit(std::string_view text);
  int fd_;
  std::string prefix_;
  OutputQueue* console_;
  std::FILE* log_ = nullptr;
  std::string partial_, last_line_;
};

}  // namespace fsdp2::tool
