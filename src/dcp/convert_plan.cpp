#include "dcp/convert_plan.h"

#include <fsdp2/error.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "dcp/geometry.h"
#include "dcp/key_patterns.h"
#include "dcp/scalar_types.h"

namespace fsdp2::dcp::detail {
namespace {

class Planner {
 public:
  Planner(TensorSource& source, const ConvertOptions& options, ConvertReport& report)
      : source_(source), options_(options), report_(report) {}

  ConvertPlan make() {
    KeyPatterns chosen(options_.keys), cast(options_.cast);
    KeyRenamer renamer(options_.rename);
    FSDP2_CHECK(options_.dtype || options_.cast.empty(), kInvalidArgument,
                "[dcp] patterns for a cast are given, but no dtype to cast to");
    const auto& items = source_.items();
    for (size_t i = 0; i < items.size(); ++i) {
      const TensorSource::Item& item = items[i];
      if (!chosen.empty() && !chosen.match(item.key)) continue;
      ConvertPlan::Entry entry{item.key, item.path, i};
      if (auto name = renamer.rename(item.key); name && *name != item.key) {
        report_.renamed.emplace_back(item.key, *name);
        entry.path = {*name};
        entry.name = std::move(*name);
      }
      if (!item.tensor) {
        if (report_.to == Format::Safetensors) {
          report_.left_out.push_back(item.key);
        } else {
          add(plan_.values, std::move(entry));
        }
        continue;
      }
      entry.dtype = dtype_of(item, cast);
      entry.sizes = item.tensor->sizes;
      add(plan_.tensors, std::move(entry));
    }
    chosen.check_used("the pattern for keys");
    cast.check_used("the pattern for casts");
    renamer.check_used();
    for (const auto& [name, twin] : options_.tied) tie(name, twin);
    return std::move(plan_);
  }

 private:
  void add(std::vector<ConvertPlan::Entry>& entries, ConvertPlan::Entry entry) {
    const auto [known, fresh] = names_.emplace(entry.name, entry.item);
    FSDP2_CHECK(fresh, kInvalidArgument, "[dcp] '", source_.items()[known->second].key, "' and '",
                source_.items()[entry.item].key, "' would both be called '", entry.name,
                "'; change the rules for new names, or choose fewer keys");
    entries.push_back(std::move(entry));
  }

  at::ScalarType dtype_of(const TensorSource::Item& item, KeyPatterns& cast) {
    const at::ScalarType dtype = item.tensor->dtype;
    if (!options_.dtype) return dtype;
    if (cast.empty() ? item.tensor->sizes.empty() : !cast.match(item.key)) return dtype;
    const bool real = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16 ||
                      dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2;
    if (!real || dtype == *options_.dtype) return dtype;
    report_.cast.push_back(item.key);
    return *options_.dtype;
  }

  void tie(const std::string& name, const std::string& twin) {
    auto& tensors = plan_.tensors;
    const auto find = [&](const std::string& wanted) {
      return std::find_if(tensors.begin(), tensors.end(), [&](const auto& entry) { return entry.name == wanted; });
    };
    const auto original = find(twin);
    FSDP2_CHECK(name != twin && original != tensors.end(), kInvalidArgument, "[dcp] '", name,
                "' is said to be tied to '", twin,
                "', but the destination has no tensor of that name; look at the keys with inspect");
    const auto copy = find(name);
    const bool leave_out = report_.to == Format::Safetensors;
    if (copy == tensors.end()) {
      FSDP2_CHECK(names_.count(name) == 0, kInvalidArgument, "[dcp] '", name, "' is said to be tied, it is no tensor");
      if (leave_out) return;
      ConvertPlan::Entry entry = *original;
      entry.name = name;
      entry.path = {name};
      add(tensors, std::move(entry));
    } else {
      FSDP2_CHECK(same(*copy, *original), kInvalidArgument, "[dcp] '", name, "' and '", twin,
                  "' are said to be tied, but they are not equal (shape ", shape_text(copy->sizes), " and ",
                  shape_text(original->sizes), "); keep both by not naming them tied");
      if (leave_out) tensors.erase(copy);
    }
    report_.tied.emplace_back(name, twin);
  }

  bool same(const ConvertPlan::Entry& a, const ConvertPlan::Entry& b) {
    if (a.dtype != b.dtype || a.sizes != b.sizes ||
        source_.items()[a.item].tensor->dtype != source_.items()[b.item].tensor->dtype)
      return false;
    bool equal = true;
    const auto element = static_cast<int64_t>(c10::elementSize(source_.items()[a.item].tensor->dtype));
    for_each_piece(whole_box(a.sizes), element, kPieceBytes, [&](const Chunk& piece) {
      if (!equal) return;
      const at::Tensor left = source_.read(a.item, piece), right = source_.read(b.item, piece);
      equal = std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
    });
    return equal;
  }

  TensorSource& source_;
  const ConvertOptions& options_;
  ConvertReport& report_;
  ConvertPlan plan_;
  std::unordered_map<std::string, size_t> names_;  // of the destination, to items
};

}  // namespace

uint64_t ConvertPlan::bytes(const Entry& tensor) const {
  return static_cast<uint64_t>(checked_numel(tensor.sizes).value_or(0)) * c10::elementSize(tensor.dtype);
}

ConvertPlan make_plan(TensorSource& source, const ConvertOptions& options, ConvertReport& report) {
  return Planner(source, options, report).make();
}

}  // namespace fsdp2::dcp::detail
