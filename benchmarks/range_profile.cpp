#include "range_profile.h"

#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "measure.h"

namespace bench {
namespace {

std::mutex mutex;  // callbacks are plain functions, so what they write is global
std::map<std::string, RangeProfile::Range> totals;
thread_local std::vector<double> inside;  // seconds of the ranges within each open one

struct Open : at::ObserverContext {
  double start = 0;
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& range) {
  if (!std::string_view(range.name()).starts_with("FSDP::")) return nullptr;
  auto open = std::make_unique<Open>();
  inside.push_back(0);
  open->start = now();
  return open;
}

void end(const at::RecordFunction& range, at::ObserverContext* context) {
  if (context == nullptr || inside.empty()) return;
  const double seconds = now() - static_cast<Open*>(context)->start;
  const double nested = inside.back();
  inside.pop_back();
  if (!inside.empty()) inside.back() += seconds;
  const std::lock_guard lock(mutex);
  RangeProfile::Range& total = totals[range.name()];
  total.seconds += seconds - nested;
  ++total.calls;
}

}  // namespace

RangeProfile::RangeProfile()
    : handle_(at::addGlobalCallback(at::RecordFunctionCallback(begin, end).scopes({at::RecordScope::USER_SCOPE}))) {
  clear();
}

RangeProfile::~RangeProfile() { at::removeCallback(handle_); }

std::map<std::string, RangeProfile::Range> RangeProfile::ranges() const {
  const std::lock_guard lock(mutex);
  return totals;
}

void RangeProfile::clear() {
  const std::lock_guard lock(mutex);
  totals.clear();
}

}  // namespace bench
