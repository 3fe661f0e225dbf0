#pragma once

// FSDP2_DIAGNOSE=1: diagnose() after the first step, without a change to the program.

#include <memory>

namespace fsdp2::detail {

class TrainingContext;

/// The first backward of the tree that reduced gradients is over.
void note_first_step(const std::shared_ptr<TrainingContext>& context);
/// Its root begins the next forward, so an optimizer has stepped. Prints the findings from rank 0. Collective.
void diagnose_first_step(TrainingContext& context);

}  // namespace fsdp2::detail
