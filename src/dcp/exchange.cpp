#include "dcp/exchange.h"

#include <algorithm>
#include <exception>

#include "process/collectives.h"

namespace fsdp2::dcp::detail {
namespace {

using fsdp2::detail::broadcast_string;

constexpr char kDone = 0;

}  // namespace

Exchange::Exchange(const ProcessGroup& group) : group_(group) {
  if (!group && !is_initialized()) return;
  rank_ = get_rank(group);
  world_size_ = get_world_size(group);
  FSDP2_CHECK(rank_ >= 0, kInvalidArgument,
              "[dcp] this process is not in the group it passed; only ranks of the group may call");
}

/// What `work` gave, after a zero; or the code and the text of its error.
std::string Exchange::run(const std::function<std::string()>& work) {
  try {
    return kDone + work();
  } catch (const Error& error) {
    return static_cast<char>(error.code()) + std::string(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return static_cast<char>(ErrorCode::kIo) + std::string(error.what());
  }
}

void Exchange::rethrow(std::string_view doing, size_t rank, const std::string& result, size_t failures) {
  std::string text = c10::str("[dcp] rank ", rank, " failed while ", doing, ": ", result.substr(1));
  if (failures > 1) text += c10::str(" (and ", failures - 1, " more ranks)");
  throw Error(static_cast<ErrorCode>(result[0]), text);
}

std::vector<std::string> Exchange::gather(std::string_view doing, const std::function<std::string()>& work) const {
  if (world_size_ == 1) return {work()};
  std::vector<std::string> all = all_gather_strings(run(work), group_);
  const auto failed = [](const std::string& result) { return result[0] != kDone; };
  const auto first = std::find_if(all.begin(), all.end(), failed);
  if (first != all.end()) {
    rethrow(doing, static_cast<size_t>(first - all.begin()), *first,
            static_cast<size_t>(std::count_if(all.begin(), all.end(), failed)));
  }
  for (std::string& result : all) result.erase(0, 1);
  return all;
}

std::string Exchange::broadcast(std::string_view doing, const std::function<std::string()>& work) const {
  if (world_size_ == 1) return work();
  std::string result = rank_ == 0 ? run(work) : std::string();
  result = broadcast_string(result, 0, group_);
  if (result[0] != kDone) rethrow(doing, 0, result, 1);
  result.erase(0, 1);
  return result;
}

}  // namespace fsdp2::dcp::detail
