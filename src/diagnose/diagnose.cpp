#include <fsdp2/diagnose.h>

#include <c10/core/GradMode.h>
#include <fsdp2/error.h>

#include <algorithm>

#include "backend/fake.h"
#include "diagnose/between_ranks.h"
#include "diagnose/report.h"
#include "diagnose/subject.h"

namespace fsdp2 {

namespace detail::diagnose {
namespace {

/// A rank whose check fails must still take part in the comparison with the others.
template <class Check>
void run(const char* name, Findings& found, Check&& check) {
  try {
    check(found);
  } catch (const std::exception& error) {
    const auto* ours = dynamic_cast<const c10::Error*>(&error);
    found.push_back(
        {"diagnosis-incomplete", Severity::kError,
         c10::str("the check of ", name, " failed: ", ours != nullptr ? ours->what_without_backtrace() : error.what()),
         "", "mend this first, or leave the rules of this check out with `ignore`"});
  }
}

Findings own_findings(const Subject& subject) {
  Findings found;
  const auto add = [&](const char* name, void (*check)(const Subject&, Findings&)) {
    run(name, found, [&](Findings& all) { check(subject, all); });
  };
  add("values", check_materialised);
  add("forwards", check_forwards);
  add("groups", check_sharding);
  add("optimizers", check_optimizers);
  add("communication", check_communication);
  add("mixed precision", check_precision);
  return found;
}

/// Rank 0 looks, so the finding is not about that rank.
Findings checkpoint_findings(const DiagnoseOptions& options) {
  Findings found;
  run("checkpoints", found, [&](Findings& all) { check_checkpoints(options.checkpoint_folder, all); });
  return found;
}

void check_options(const DiagnoseOptions& options) {
  for (const std::string& rule : options.ignore) {
    FSDP2_CHECK(rule_index(rule) < diagnose_rules().size(), kInvalidArgument, "[diagnose] ignore names the rule \"",
                rule, "\", which there is not; diagnose_rules() lists all");
  }
}

}  // namespace
}  // namespace detail::diagnose

Diagnosis diagnose(ModuleRef model, const std::vector<torch::optim::Optimizer*>& optimizers,
                   const DiagnoseOptions& options) {
  using namespace detail::diagnose;
  check_options(options);
  const detail::PlainWork plain;
  const Subject subject(*model, optimizers, options);
  Findings own = own_findings(subject);
  const bool reads_checkpoints = !is_initialized() || get_rank() == 0;
  if (reads_checkpoints) {
    const Findings of_checkpoints = checkpoint_findings(options);
    own.insert(own.end(), of_checkpoints.begin(), of_checkpoints.end());
  }
  Diagnosis result;
  const bool has_others = is_initialized() && !detail::fake_backend::is_fake(default_group());
  result.findings = has_others ? compare_ranks(subject, own) : own;
  std::erase_if(result.findings, [&](const Finding& each) {
    return std::find(options.ignore.begin(), options.ignore.end(), each.rule) != options.ignore.end();
  });
  for (Finding& each : result.findings) {
    if (each.rule.starts_with("checkpoint-")) each.ranks.clear();
  }
  std::stable_sort(result.findings.begin(), result.findings.end(), [](const Finding& a, const Finding& b) {
    return std::make_pair(-static_cast<int>(a.severity), rule_index(a.rule)) <
           std::make_pair(-static_cast<int>(b.severity), rule_index(b.rule));
  });
  return result;
}

Diagnosis diagnose(ModuleRef model, torch::optim::Optimizer* optimizer, const DiagnoseOptions& options) {
  return diagnose(
      model,
      optimizer != nullptr ? std::vector<torch::optim::Optimizer*>{optimizer} : std::vector<torch::optim::Optimizer*>{},
      options);
}

}  // namespace fsdp2
