#include "dcp/exchange.h"

#include <algorithm>
#include <exception>

namespace fsdp2::dcp::detail {
namespace {

constexpr char kDone = 0;

}  // namespace

Exchange::Exchange(const ProcessGroup& group) : group_(group) {
  if (!group && !is_initialized()) return;
  rank_ = get_rank(group);
  world_size_ = get_world_size(group);
  FSDP2_CHECK(rank_ >= 0, kInvalidArgument,
              "[dcp] this process is not in the group it passed; only ranks of the group may call");
}

std::vector<std::string> Exchange::gather(std::string_view doing, const std::function<std::string()>& work) const {
  if (world_size_ == 1) return {work()};
  std::string mine;
  try {
    mine = kDone + work();
  } catch (const Error& error) {
    mine = static_cast<char>(error.code()) + std::string(error.what_without_backtrace());
  } catch (const std::exception& error) {
    mine = static_cast<char>(ErrorCode::kIo) + std::string(error.what());
  }
  std::vector<std::string> all = all_gather_strings(mine, group_);
  const auto failed = [](const std::string& result) { return result[0] != kDone; };
  const auto first = std::find_if(all.begin(), all.end(), failed);
  if (first != all.end()) {
    std::string text = c10::str("[dcp] rank ", first - all.begin(), " failed while ", doing, ": ", first->substr(1));
    const auto failures = std::count_if(all.begin(), all.end(), failed);
    if (failures > 1) text += c10::str(" (and ", failures - 1, " more ranks)");
    throw Error(static_cast<ErrorCode>((*first)[0]), text);
  }
  for (std::string& result : all) result.erase(0, 1);
  return all;
}

}  // namespace fsdp2::dcp::detail
