#pragma once

// Steps that all ranks take together, with errors that reach all of them.

#include <fsdp2/error.h>
#include <fsdp2/process_group.h>

#include <concepts>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp2::dcp::detail {

class Exchange {
 public:
  /// {} = the default group, or this process alone where there is none.
  explicit Exchange(const ProcessGroup& group);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  /// Different for different groups that exist at a time.
  const void* id() const { return group_.get(); }

  /// Runs `work` on every rank and gives every rank all results, by rank. If it throws anywhere,
  /// every rank gets an fsdp2::Error that names the first rank that failed and says why. `doing`
  /// completes "failed while ...".
  std::vector<std::string> gather(std::string_view doing, const std::function<std::string()>& work) const;
  /// Runs `work` on rank 0 and gives every rank its result, or its error.
  std::string broadcast(std::string_view doing, const std::function<std::string()>& work) const;

 private:
  static std::string run(const std::function<std::string()>& work);
  [[noreturn]] static void rethrow(std::string_view doing, size_t rank, const std::string& result, size_t failures);

  ProcessGroup group_;
  int rank_ = 0, world_size_ = 1;
};

/// Numbers, texts and lists of numbers as bytes.
class ByteWriter {
 public:
  template <std::integral T>
  void number(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void text(std::string_view text) {
    number(uint64_t{text.size()});
    out_.append(text);
  }
  void numbers(const std::vector<int64_t>& values) {
    number(uint64_t{values.size()});
    for (int64_t value : values) number(value);
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

class ByteReader {
 public:
  explicit ByteReader(std::string_view input) : input_(input) {}
  bool done() const { return input_.empty(); }
  template <std::integral T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string text() { return std::string(take(number<uint64_t>())); }
  std::vector<int64_t> numbers() {
    std::vector<int64_t> values(number<uint64_t>());
    for (int64_t& value : values) value = number<int64_t>();
    return values;
  }

 private:
  std::string_view take(size_t count) {
    FSDP2_CHECK(count <= input_.size(), kPeerFailed, "[dcp] another rank sent a message that ends too early");
    const std::string_view result = input_.substr(0, count);
    input_.remove_prefix(count);
    return result;
  }
  std::string_view input_;
};

}  // namespace fsdp2::dcp::detail
