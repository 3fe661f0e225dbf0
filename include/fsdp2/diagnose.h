#pragma once

// A checklist as a program: what is probably wrong with how a model is sharded and trained, and how to mend it.
// docs/diagnose.md has all rules.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <fsdp2/export.h>
#include <fsdp2/module_ref.h>

namespace fsdp2 {

enum class Severity {
  kNote,     ///< it works, and can be faster or smaller
  kWarning,  ///< probably not what was meant
  kError     ///< wrong numbers, or an error sooner or later
};
/// "note", "warning", "error".
FSDP2_API const char* to_string(Severity severity) noexcept;

struct Finding {
  std::string rule;  ///< a stable id, e.g. "only-root-sharded"
  Severity severity = Severity::kWarning;
  std::string what;   ///< with the values seen
  std::string where;  ///< a module or parameter, named from the model; "" is the model itself, or the whole program
  std::string fix;
  std::vector<int> ranks = {};  ///< that show it, in the default group; empty: all of them, or it lies between ranks

  bool operator==(const Finding&) const = default;
};

/// Errors first, then in the order of the rules.
struct FSDP2_API Diagnosis {
  std::vector<Finding> findings;

  bool empty() const { return findings.empty(); }
  size_t size() const { return findings.size(); }
  auto begin() const { return findings.begin(); }
  auto end() const { return findings.end(); }
  bool has(const std::string& rule) const;

  /// For people: one block a finding, and a last line that counts them.
  std::string to_table() const;
  /// {"findings": [{"rule", "severity", "what", "where", "fix", "ranks"}, ...], "errors": n, "warnings": n, "notes": n}
  std::string to_json() const;
};

struct DiagnoseOptions {
  /// A checkpoint, or a folder with the checkpoints of a run, to look at; rank 0 reads it. Empty: none.
  std::filesystem::path checkpoint_folder = {};
  /// Compare values of buffers and replicated parameters between ranks, by hashes. Reads every one of them once.
  bool compare_values = true;
  /// Groups whose whole parameters have fewer bytes are dominated by latency. Default: 32 KiB on the CPU, 512 KiB else.
  std::optional<int64_t> small_group_bytes = {};
  /// Ids of rules that are not wanted.
  std::vector<std::string> ignore = {};
};

/// Looks at `model`, at `optimizer` if there is one, and at what happened so far; after the first step it sees the
/// most, and rules that need a step say nothing before it. Changes nothing. Every rank calls it at the same place with
/// equal options, outside forward and backward; models that differ between ranks are a finding, not a hang. All ranks
/// get the same findings. In one process without init_process_group only what one rank can see is looked at. The
/// state of optimizers is looked at for Adam, AdamW, SGD, Adagrad and RMSprop.
/// Errors: kInvalidArgument (options that differ between ranks, an unknown id in `ignore`).
///
///     const fsdp2::Diagnosis found = fsdp2::diagnose(net, &optimizer);
///     if (fsdp2::get_rank() == 0) std::cerr << found.to_table();
///
/// Without a change to the program: FSDP2_DIAGNOSE=1 runs it, without the optimizer, at the beginning of the second
/// step of every model (or in destroy_process_group) and prints the table from rank 0 to stderr.
FSDP2_API Diagnosis diagnose(ModuleRef model, torch::optim::Optimizer* optimizer = nullptr,
                             const DiagnoseOptions& options = {});
/// For a model that several optimizers share.
FSDP2_API Diagnosis diagnose(ModuleRef model, const std::vector<torch::optim::Optimizer*>& optimizers,
                             const DiagnoseOptions& options = {});

/// Ids of all rules.
FSDP2_API const std::vector<std::string>& diagnose_rules();

}  // namespace fsdp2
