// Variables that change what a job does.

#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <map>
#include <optional>

#include "checkpoint/text.h"
#include "doctor/host.h"
#include "doctor/topic.h"
#include "edit_distance.h"

namespace fsdp2::tool {
namespace {

// All that the library and the program read.
constexpr std::array kKnown = {"FSDP2_CPU_ALLOCATOR", "FSDP2_DEBUG",     "FSDP2_DEBUG_POISON", "FSDP2_DIAGNOSE",
                               "FSDP2_HOST_ID",       "FSDP2_RUN_CHAIN", "FSDP2_SHM_IN_PLACE"};

constexpr std::array kShown = {
    "RANK",        "LOCAL_RANK",  "WORLD_SIZE",      "LOCAL_WORLD_SIZE",     "OMP_NUM_THREADS",
    "MASTER_ADDR", "MASTER_PORT", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHON_EXEC"};
constexpr std::array kShownPrefixes = {"FSDP2_", "TORCH", "NCCL_", "GLOO_", "PET_"};

struct Setting {
  const char *name, *value, *effect;
};
constexpr Setting kSettings[] = {
    {"FSDP2_DEBUG", "0", "ranks do not compare what they built and reduced: a mistake can go unnoticed"},
    {"FSDP2_DEBUG_POISON", "1", "freed weights are filled with NaN, which takes time; it is for finding mistakes"},
    {"FSDP2_SHM_IN_PLACE", "0", "weights are copied in every gather, which takes time and memory"},
    {"FSDP2_CPU_ALLOCATOR", "0", "large tensors come from malloc, which takes time and memory"},
};

using Variables = std::map<std::string, std::string>;

Variables all_variables() {
  Variables out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string::npos && equals + 1 < text.size()) out[text.substr(0, equals)] = text.substr(equals + 1);
  }
  return out;
}

bool is_shown(const std::string& name) {
  for (const char* shown : kShown) {
    if (name == shown) return true;
  }
  for (const char* prefix : kShownPrefixes) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

std::string value_of(const Variables& variables, const std::string& name) {
  const auto found = variables.find(name);
  return found == variables.end() ? "" : found->second;
}

std::optional<int> integer(const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::optional<int>(value) : std::nullopt;
}

void check_names(const Variables& variables, Topic& topic) {
  for (const auto& [name, value] : variables) {
    if (!name.starts_with("FSDP2_")) continue;
    std::string nearest = kKnown.front(), all;
    bool known = false;
    for (const char* each : kKnown) {
      known |= name == each;
      if (edit_distance(name, each) < edit_distance(name, nearest)) nearest = each;
      all += (all.empty() ? "" : ", ") + std::string(each);
    }
    if (known) continue;
    topic.find(Severity::kWarning, "unknown-variable", name + "=" + value + " is set, and nothing reads it",
               edit_distance(name, nearest) <= 4 ? "did you mean " + nearest + "?" : "unset it; there are: " + all);
  }
  for (const Setting& setting : kSettings) {
    if (value_of(variables, setting.name) != setting.value) continue;
    topic.find(Severity::kNote, "setting", std::string(setting.name) + "=" + setting.value + ": " + setting.effect,
               std::string("unset ") + setting.name + " when it is not wanted any more");
  }
}

void check_rank(const Variables& variables, Topic& topic) {
  const std::string rank = value_of(variables, "RANK"), size = value_of(variables, "WORLD_SIZE");
  if (rank.empty() && size.empty()) return;
  const std::string fix =
      "start programs with fsdp2 run --nproc-per-node N, which sets all of them, or set or unset them together";
  std::string there, missing;
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    std::string& list = value_of(variables, name).empty() ? missing : there;
    list += (list.empty() ? "" : ", ") + std::string(name);
  }
  if (!missing.empty()) {
    topic.find(Severity::kError, "launch-variables",
               there + " set without " + missing + ": init_process_group needs all four", fix);
    return;
  }
  const auto rank_number = integer(rank), size_number = integer(size),
             port = integer(value_of(variables, "MASTER_PORT"));
  if (!rank_number || !size_number || *rank_number < 0 || *rank_number >= *size_number) {
    topic.find(Severity::kError, "launch-variables",
               "RANK=" + rank + " with WORLD_SIZE=" + size + "; a rank is a number from 0 to the world size minus 1",
               fix);
  } else if (!port || *port < 1 || *port > 65535) {
    topic.find(Severity::kError, "launch-variables",
               "MASTER_PORT=" + value_of(variables, "MASTER_PORT") + "; a port is a number from 1 to 65535", fix);
  } else if (value_of(variables, "LOCAL_RANK").empty()) {
    topic.find(Severity::kWarning, "local-rank",
               "RANK is set without LOCAL_RANK: every rank of this machine takes the first device", fix);
  }
}

void check_threads(const Variables& variables, int num_ranks, Topic& topic) {
  const int usable = cores().usable;
  const std::string set = value_of(variables, "OMP_NUM_THREADS");
  const std::string fix = "export OMP_NUM_THREADS=" + std::to_string(std::max(1, usable / num_ranks)) +
                          ", the usable cores (" + std::to_string(usable) + ") divided by the ranks";
  if (set.empty()) {
    if (num_ranks == 1) return;
    topic.find(Severity::kNote, "omp-threads",
               "OMP_NUM_THREADS is not set: under fsdp2 run each of several ranks gets 1 thread, without it as many as "
               "there are cores",
               fix);
    return;
  }
  const auto threads = integer(set.substr(0, set.find(',')));
  if (!threads || *threads < 1) {
    topic.find(Severity::kWarning, "omp-threads", "OMP_NUM_THREADS=" + set + " is not a number of threads", fix);
  } else if (*threads > 1 && *threads * num_ranks > usable) {
    topic.find(Severity::kWarning, "omp-threads",
               "OMP_NUM_THREADS=" + set + " times " + count_text(static_cast<size_t>(num_ranks), "rank") +
                   " is more than " + count_text(static_cast<size_t>(usable), "usable core"),
               fix);
  }
}

}  // namespace

void check_environment(const DoctorOptions& options, Topic& topic) {
  const Variables variables = all_variables();
  Json shown = Json::object();
  for (const auto& [name, value] : variables) {
    if (!is_shown(name)) continue;
    shown[name] = value;
    topic.fact("variables", shown, name, value);
  }
  topic.fact("variables", shown);
  check_names(variables, topic);
  check_rank(variables, topic);
  check_threads(variables, options.num_ranks, topic);
}

}  // namespace fsdp2::tool
