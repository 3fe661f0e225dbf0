#pragma once

// A model and its optimizer as one entry of a checkpoint. Python twin: the AppState of the DCP recipe.

#include <fsdp2/dcp/state_dict.h>

#include <memory>
#include <vector>

namespace fsdp2 {

/// {"model": get_model_state_dict, "optim": get_optimizer_state_dict}, which dcp::load puts back by set_state_dict:
///
///     fsdp2::dcp::StateDict state{{"app", fsdp2::app_state(model, optimizer)}, {"step", step}};
///     fsdp2::dcp::save(state, folder);                     // or
///     fsdp2::dcp::load(state, folder);                     // model and optimizer are as they were saved
///     step = state["step"].integer();
///
/// Both must outlive it. A group that is unsharded when it is saved or loaded is resharded first.
FSDP2_API std::shared_ptr<dcp::Stateful> app_state(ModuleRef module, torch::optim::Optimizer& optimizer,
                                                   const StateDictOptions& options = {});
FSDP2_API std::shared_ptr<dcp::Stateful> app_state(ModuleRef module,
                                                   const std::vector<torch::optim::Optimizer*>& optimizers,
                                                   const StateDictOptions& options = {});

}  // namespace fsdp2
