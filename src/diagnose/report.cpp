#include "diagnose/report.h"

#include <c10/util/StringUtil.h>
#include <fsdp2/error.h>

#include <algorithm>

namespace fsdp2 {

using nlohmann::json;

const char* to_string(Severity severity) noexcept {
  switch (severity) {
    case Severity::kNote:
      return "note";
    case Severity::kWarning:
      return "warning";
    case Severity::kError:
      return "error";
  }
  return "unknown";
}

const std::vector<std::string>& diagnose_rules() {
  static const auto& rules = *new std::vector<std::string>{
      "diagnosis-incomplete",
      "ranks-differ",
      "shared-device",
      "local-rank",
      "parameter-on-meta",
      "parameter-unwritten",
      "forward-refused",
      "forward-not-hooked",
      "root-sharded-first",
      "nothing-sharded",
      "parameter-not-sharded",
      "only-root-sharded",
      "dominant-group",
      "optimizer-foreign-parameter",
      "optimizer-missing-parameter",
      "optimizer-state-layout",
      "gradients-missing",
      "replicas-differ",
      "buffers-differ",
      "checkpoint-unreadable",
      "checkpoint-mixed-formats",
      "checkpoint-mixed-versions",
      "checkpoint-mixed-world-sizes",
      "small-groups",
      "frozen-gathered",
      "reshard-cannot-pay",
      "mixed-precision-no-effect",
  };
  return rules;
}

namespace {

int64_t count(const std::vector<Finding>& findings, Severity severity) {
  return std::count_if(findings.begin(), findings.end(),
                       [&](const Finding& each) { return each.severity == severity; });
}

std::string counted(int64_t number, const char* name) { return c10::str(number, " ", name, number == 1 ? "" : "s"); }

}  // namespace

bool Diagnosis::has(const std::string& rule) const {
  return std::any_of(begin(), end(), [&](const Finding& each) { return each.rule == rule; });
}

std::string Diagnosis::to_table() const {
  std::string text;
  for (const Finding& each : findings) {
    text += c10::str(to_string(each.severity), "  ", each.rule);
    if (!each.where.empty()) text += "  " + each.where;
    if (!each.ranks.empty())
      text += c10::str("  (rank", each.ranks.size() > 1 ? "s " : " ", c10::Join(", ", each.ranks), ")");
    text += c10::str("\n  what  ", each.what, "\n  fix   ", each.fix, "\n");
  }
  if (findings.empty()) return "fsdp2 diagnose: nothing found\n";
  return c10::str(text, "fsdp2 diagnose: ", counted(count(findings, Severity::kError), "error"), ", ",
                  counted(count(findings, Severity::kWarning), "warning"), ", ",
                  counted(count(findings, Severity::kNote), "note"), "\n");
}

std::string Diagnosis::to_json() const {
  json all{{"findings", json::array()},
           {"errors", count(findings, Severity::kError)},
           {"warnings", count(findings, Severity::kWarning)},
           {"notes", count(findings, Severity::kNote)}};
  for (const Finding& each : findings) all["findings"].push_back(detail::diagnose::json_of(each));
  return all.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

namespace detail::diagnose {

json json_of(const Finding& finding) {
  return {{"rule", finding.rule}, {"severity", to_string(finding.severity)},
          {"what", finding.what}, {"where", finding.where},
          {"fix", finding.fix},   {"ranks", finding.ranks}};
}

Finding finding_from(const json& value) {
  const std::string severity = value["severity"];
  return {value["rule"],
          severity == "note" ? Severity::kNote : severity == "warning" ? Severity::kWarning : Severity::kError,
          value["what"],
          value["where"],
          value["fix"],
          value["ranks"].get<std::vector<int>>()};
}

size_t rule_index(const std::string& rule) {
  const auto& rules = diagnose_rules();
  return std::find(rules.begin(), rules.end(), rule) - rules.begin();
}

}  // namespace detail::diagnose

}  // namespace fsdp2
