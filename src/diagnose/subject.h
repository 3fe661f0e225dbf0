#pragma once

// What the rules look at: a model, its optimizers, and what fully_shard made of it.

#include <fsdp2/diagnose.h>

#include <memory>
#include <string>
#include <vector>

#include "fsdp/module_state.h"

namespace fsdp2::detail::diagnose {

/// A parameter under its first name.
struct SeenParam {
  std::string fqn;
  Tensor tensor;
  ParameterOwner owner;  // empty: no group has it

  /// As it is while sharded; null for a plain one.
  const DTensorSpec* spec() const;
  /// This rank's data.
  const Tensor& local() const;
  bool trainable() const { return tensor.requires_grad(); }
};

struct SeenState {
  std::shared_ptr<ModuleState> state;
  std::string fqn;  // from the model; of a list, its first member's
  bool has_state_above = false;

  /// Bytes of its groups' parameters while they are whole.
  int64_t whole_bytes() const;
  /// "block0", or "the model".
  std::string name() const { return fqn.empty() ? "the model" : fqn; }
};

struct Subject {
  Subject(torch::nn::Module& model, const std::vector<torch::optim::Optimizer*>& optimizers,
          const DiagnoseOptions& options);

  torch::nn::Module& model;
  const std::vector<torch::optim::Optimizer*>& optimizers;
  const DiagnoseOptions& options;
  std::vector<SeenParam> params;
  std::vector<std::pair<std::string, Tensor>> buffers;
  std::vector<SeenState> states;  // in module order
  int64_t small_group_bytes = 0;

  /// Whether some forward ran through the hooks.
  bool ran() const;
  /// Of the groups, else of the first parameter.
  c10::Device device() const;
};

/// Bytes of the whole parameter as its group gathers it.
int64_t whole_bytes(const FSDPParam& param, const MixedPrecisionPolicy& policy);

/// "a, b, c and 4 more".
std::string list_names(const std::vector<std::string>& names, size_t most = 4);
/// "3.0 MiB".
std::string bytes_text(int64_t bytes);

using Findings = std::vector<Finding>;

// What one rank can see. Each adds its findings.
void check_materialised(const Subject& subject, Findings& found);
void check_forwards(const Subject& subject, Findings& found);
void check_sharding(const Subject& subject, Findings& found);
void check_communication(const Subject& subject, Findings& found);
void check_precision(const Subject& subject, Findings& found);
void check_optimizers(const Subject& subject, Findings& found);
/// Of one rank for all.
void check_checkpoints(const std::filesystem::path& folder, Findings& found);

}  // namespace fsdp2::detail::diagnose
