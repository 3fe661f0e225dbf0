#include "console.h"

#include <limits.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include <fsdp2/error.h>

namespace fsdp2::tool {
namespace {

constexpr size_t kLongestLine = size_t{64} * 1024;  // longer ones are cut, so that memory stays bounded

bool blank(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](unsigned char c) { return isspace(c); });
}

/// What a terminal would still show of a line in which carriage returns went back to its start.
std::string_view visible(std::string_view text) {
  while (!text.empty() && text.back() == '\r') text.remove_suffix(1);
  auto start = text.rfind('\r');
  return start == std::string_view::npos ? text : text.substr(start + 1);
}

}  // namespace

OutputQueue::OutputQueue(int fd) : fd_(fd), terminal_(isatty(fd) == 1) {}

void OutputQueue::end_update() {
  if (update_shown_) pending_ += "\r\033[K";
  update_shown_ = false;
}

void OutputQueue::line(std::string_view prefix, std::string_view text) {
  end_update();
  pending_.append(prefix).append(text) += '\n';
}

void OutputQueue::update(std::string_view prefix, std::string_view text) {
  end_update();
  pending_.append(prefix).append(text);
  update_shown_ = true;
}

void OutputQueue::flush_some() {
  while (!empty() && !broken_) {
    pollfd ready{fd_, POLLOUT, 0};
    if (poll(&ready, 1, 0) <= 0) break;
    // After POLLOUT a pipe takes PIPE_BUF bytes without blocking, even when it is not O_NONBLOCK
    // (its flags are shared with whoever gave it to us, so they stay as they are).
    size_t count = std::min<size_t>(pending_.size() - written_, PIPE_BUF);
    ssize_t wrote = write(fd_, pending_.data() + written_, count);
    if (wrote < 0) {
      if (errno == EINTR || errno == EAGAIN) break;
      broken_ = true;
    } else {
      written_ += static_cast<size_t>(wrote);
    }
  }
  if (broken_) written_ = pending_.size();
  if (empty()) {
    pending_.clear();
    written_ = 0;
  }
}

void OutputQueue::flush(double seconds) {
  auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  end_update();
  for (flush_some(); !empty() && std::chrono::steady_clock::now() < deadline; flush_some()) {
    pollfd ready{fd_, POLLOUT, 0};
    poll(&ready, 1, 50);
  }
}

RankStream::RankStream(int fd, std::string prefix, OutputQueue* console, const std::string& log_path)
    : fd_(fd), prefix_(std::move(prefix)), console_(console) {
  if (log_path.empty()) return;
  log_ = std::fopen(log_path.c_str(), "we");
  FSDP2_CHECK(log_, kIo, "[run] cannot write ", log_path, ": ", strerror(errno), "; choose another --log-dir");
}

RankStream::~RankStream() { finish(); }

void RankStream::pump() {
  char buffer[16384];
  for (int rounds = 0; rounds < 16 && fd_ >= 0; ++rounds) {
    ssize_t got = read(fd_, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) return finish();  // a closed pseudo terminal reads as EIO
    if (log_) {
      std::fwrite(buffer, 1, static_cast<size_t>(got), log_);
      std::fflush(log_);
    }
    partial_.append(buffer, static_cast<size_t>(got));
    cut_lines();
    // The reader of our output is gone: let the rank notice, as it would without us.
    if (console_ && console_->broken() && !log_) return finish();
    if (console_ && console_->full()) return;
  }
}

void RankStream::cut_lines() {
  size_t begin = 0;
  for (auto end = partial_.find('\n'); end != std::string::npos; end = partial_.find('\n', begin)) {
    emit(std::string_view(partial_).substr(begin, end - begin));
    begin = end + 1;
  }
  for (; partial_.size() - begin > kLongestLine; begin += kLongestLine) {
    emit(std::string_view(partial_).substr(begin, kLongestLine));
  }
  partial_.erase(0, begin);
  if (console_ && console_->is_terminal() && partial_.find('\r') != std::string::npos) {
    console_->update(prefix_, visible(partial_));
  }
}

void RankStream::emit(std::string_view text) {
  if (!blank(text)) last_line_ = visible(text);
  if (console_) console_->line(prefix_, console_->is_terminal() ? visible(text) : text);
}

void RankStream::finish() {
  if (fd_ < 0) return;
  if (!partial_.empty()) emit(partial_);
  partial_.clear();
  close(fd_);
  fd_ = -1;
  if (log_) std::fclose(log_);
  log_ = nullptr;
}

}  // namespace fsdp2::tool
