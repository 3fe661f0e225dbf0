#include "diagnose/first_step.h"

#include <fsdp2/diagnose.h>
#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include <cstdio>
#include <vector>

#include "fsdp/module_state.h"
#include "process/world.h"

namespace fsdp2::detail {

namespace {

std::vector<std::weak_ptr<TrainingContext>>& due() {
  static auto* waiting = new std::vector<std::weak_ptr<TrainingContext>>();
  return *waiting;
}

/// Programs of one step, and those that end with it. Not where the process ends without saying so: it may have failed,
/// and the others may not come.
void diagnose_what_is_due() {
  const auto waiting = std::exchange(due(), {});
  if (world() == nullptr || world()->exiting) return;
  for (const auto& weak : waiting) {
    const auto context = weak.lock();
    if (!context || !context->diagnose_due) continue;
    try {
      diagnose_first_step(*context);
    } catch (const Error& error) {
      FSDP2_LOG_WARN("[diagnose] FSDP2_DIAGNOSE=1 found nothing out: ", error.what_without_backtrace());
    }
  }
}

}  // namespace

void note_first_step(const std::shared_ptr<TrainingContext>& context) {
  if (world() == nullptr || !world()->diagnose) return;
  context->diagnose_due = true;
  due().push_back(context);
  before_destroy(diagnose_what_is_due);
}

void diagnose_first_step(TrainingContext& context) {
  context.diagnose_due = false;
  const auto root = context.states.empty() ? nullptr : context.states.front().lock();
  const auto modules = root ? root->modules() : std::vector<std::shared_ptr<torch::nn::Module>>();
  if (modules.empty()) return;
  const Diagnosis found = fsdp2::diagnose(*modules.front());
  if (get_rank() != 0) return;
  const std::string text =
      c10::str("FSDP2_DIAGNOSE=1, after the first step of ", modules.front()->name(), ":\n", found.to_table());
  std::fputs(text.c_str(), stderr);
}

}  // namespace fsdp2::detail
