// Mixed precision that changes nothing.

#include <algorithm>

#include "diagnose/subject.h"

namespace fsdp2::detail::diagnose {

namespace {

/// One policy is often given to all modules: a dtype is of no effect where it has none in any of them.
class Field {
 public:
  void set_in(const SeenState& each, bool effect) {
    if (first_.empty()) first_ = each.fqn;
    set_ = true;
    effect_ |= effect;
  }
  void report(const std::string& what, const std::string& fix, Findings& found) const {
    if (set_ && !effect_) found.push_back({"mixed-precision-no-effect", Severity::kNote, what, first_, fix});
  }

 private:
  std::string first_;
  bool set_ = false, effect_ = false;
};

}  // namespace

void check_precision(const Subject& subject, Findings& found) {
  Field param_dtype, reduce_dtype, buffer_dtype;
  std::optional<at::ScalarType> params, reductions, buffers;
  for (const SeenState& each : subject.states) {
    const MixedPrecisionPolicy& policy = each.state->policy();
    bool casts = false, reduces = false;
    for (const auto& group : each.state->groups) {
      for (const FSDPParam& param : group->params()) {
        const at::ScalarType orig = param.orig_dtype();
        if (!at::isFloatingType(orig)) continue;
        casts |= policy.param_dtype && *policy.param_dtype != orig;
        reduces |= policy.reduce_dtype && *policy.reduce_dtype != policy.param_dtype.value_or(orig);
      }
    }
    if (!each.state->groups.empty() && policy.param_dtype) param_dtype.set_in(each, casts);
    if (!each.state->groups.empty() && policy.reduce_dtype) reduce_dtype.set_in(each, reduces);
    if (policy.buffer_dtype) {
      buffer_dtype.set_in(each, std::any_of(subject.buffers.begin(), subject.buffers.end(), [&](const auto& named) {
                            return named.second.is_floating_point() &&
                                   named.second.scalar_type() != *policy.buffer_dtype;
                          }));
    }
    if (policy.param_dtype) params = policy.param_dtype;
    if (policy.reduce_dtype) reductions = policy.reduce_dtype;
    if (policy.buffer_dtype) buffers = policy.buffer_dtype;
  }
  if (params) {
    param_dtype.report(c10::str("param_dtype is ", *params, ", and so are the parameters: nothing is cast, and the ",
                                "optimizer has no copy of higher precision"),
                       "make the model in float32 and leave param_dtype as it is, or leave the policy out", found);
  }
  if (reductions) {
    reduce_dtype.report(c10::str("reduce_dtype is ", *reductions, ", which the gradients have anyway"),
                        "leave reduce_dtype out, or set a param_dtype that differs from it", found);
  }
  if (buffers) {
    buffer_dtype.report(c10::str("buffer_dtype is ", *buffers, ", but no floating-point buffer has another dtype"),
                        "leave buffer_dtype out", found);
  }
}

}  // namespace fsdp2::detail::diagnose
