#include "checkpoint/command.h"

#include <fsdp2/error.h>

namespace fsdp2::tool {

CheckpointCommand::CheckpointCommand(CLI::App& program) {
  app_ = program.add_subcommand("checkpoint", "List, verify, convert and reshard checkpoints, without a training job.");
  app_->footer(
      "PATH, SOURCE and DESTINATION are a DCP folder (torch.distributed.checkpoint), a HuggingFace folder of\n"
      "safetensors files, one .safetensors file, or one file of torch.save (.pt).\n\n"
      "Examples:\n"
      "  fsdp2 checkpoint inspect runs/step_100\n"
      "  fsdp2 checkpoint verify runs/step_100\n"
      "  fsdp2 checkpoint convert runs/step_100 my-model --keys 'model.*' --rename 'model.*=*' --dtype bfloat16\n"
      "  fsdp2 checkpoint reshard runs/step_100 runs/step_100_8 --ranks 8\n\n"
      "Exit codes: 0 all is well, 1 damaged or not there, 2 the call makes no sense.");
  app_->require_subcommand(1);
  for (const auto add : {add_inspect, add_verify, add_convert, add_reshard}) subcommands_.push_back(add(*app_));
}

void CheckpointCommand::check_name(const std::string& name) const {
  std::string all;
  for (const Subcommand& subcommand : subcommands_) {
    if (subcommand.app->get_name() == name) return;
    all += (all.empty() ? "" : ", ") + subcommand.app->get_name();
  }
  FSDP2_THROW(kInvalidArgument, "there is no 'checkpoint ", name, "'; there are: ", all);
}

int CheckpointCommand::run() const {
  for (const Subcommand& subcommand : subcommands_) {
    if (subcommand.app->parsed()) return subcommand.run();
  }
  FSDP2_THROW(kInvalidArgument, "[checkpoint] say what to do: inspect, verify, convert or reshard");
}

}  // namespace fsdp2::tool
