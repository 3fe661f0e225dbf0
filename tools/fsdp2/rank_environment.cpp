#include "rank_environment.h"

#include <stdlib.h>
#include <unistd.h>

#include "process_sweep.h"
#include "signal_names.h"

namespace fsdp2::tool {

Variables rank_variables(const RunOptions& options, const JobShape& job, int local_rank) {
  auto rank = std::to_string(job.first_rank + local_rank);
  auto world_size = std::to_string(job.world_size);
  std::string signals;
  for (int number : options.signals) signals += (signals.empty() ? "" : ",") + signal_name(number);
  const char* outer_chain = getenv(kRunChainVariable);
  const char* nccl_handling = getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
  Variables variables = {
      {"RANK", rank},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"WORLD_SIZE", world_size},
      {"LOCAL_WORLD_SIZE", std::to_string(options.num_local_ranks)},
      {"GROUP_RANK", std::to_string(options.node_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(options.num_nodes)},
      {"ROLE_NAME", options.role},
      {"ROLE_RANK", rank},
      {"ROLE_WORLD_SIZE", world_size},
      {"MASTER_ADDR", options.master_addr},
      {"MASTER_PORT", std::to_string(job.port)},
      {"TORCHELASTIC_RUN_ID", job.run_id},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"TORCHELASTIC_MAX_RESTARTS", "0"},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
      {"TORCHELASTIC_ERROR_FILE", rank_folder(job, local_rank) + "/error.json"},
      {"TORCHELASTIC_SIGNALS_TO_HANDLE", signals},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING", nccl_handling ? nccl_handling : "1"},
      {kRunChainVariable, (outer_chain ? std::string(outer_chain) + ":" : "") + job.unique_id},
  };
  if (!getenv("OMP_NUM_THREADS") && options.num_local_ranks > 1) variables.emplace_back("OMP_NUM_THREADS", "1");
  return variables;
}

std::vector<std::string> merged_environment(const Variables& variables) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry; ++entry) {
    std::string text = *entry;
    bool replaced = false;
    for (const auto& [name, value] : variables) replaced |= text.starts_with(name + "=");
    if (!replaced) merged.push_back(std::move(text));
  }
  for (const auto& [name, value] : variables) merged.push_back(name + "=" + value);
  return merged;
}

std::string rank_folder(const JobShape& job, int local_rank) {
  return job.scratch_folder + "/attempt_0/" + std::to_string(local_rank);
}

std::string line_prefix(const RunOptions& options, const JobShape& job, int local_rank) {
  if (!options.prefix) return "";
  auto rank = std::to_string(job.first_rank + local_rank);
  const char* wanted = getenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE");
  if (!wanted) return "[rank " + rank + "] ";
  std::string text = wanted;
  const std::pair<std::string, std::string> holes[] = {
      {"${role_name}", options.role}, {"${rank}", rank}, {"${local_rank}", std::to_string(local_rank)}};
  for (const auto& [hole, value] : holes) {
    for (auto at = text.find(hole); at != std::string::npos; at = text.find(hole, at + value.size())) {
      text.replace(at, hole.size(), value);
    }
  }
  return text;
}

}  // namespace fsdp2::tool
