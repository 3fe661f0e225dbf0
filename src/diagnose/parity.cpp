#include <fsdp2/check_parity.h>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <fsdp2/dcp/state_dict.h>
#include <fsdp2/error.h>
#include <fsdp2/log.h>
#include <fsdp2/process_group.h>
#include <fsdp2/tensor/dtensor.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace fsdp2 {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Names = std::vector<std::pair<std::string, Tensor>>;

Names parameters_of(const torch::nn::Module& module) {
  Names names;
  for (const auto& named : module.named_parameters()) names.emplace_back(named.key(), named.value());
  return names;
}

Names buffers_of(const torch::nn::Module& module) {
  Names names;
  for (const auto& named : module.named_buffers()) names.emplace_back(named.key(), named.value());
  return names;
}

Tensor plain_of(const Tensor& tensor) { return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor; }

/// Collective where `sharded` is a DTensor.
double difference_of(const Tensor& plain, const Tensor& sharded) {
  const at::NoGradGuard no_grad;
  const Tensor right = sharded.defined() ? plain_of(sharded.detach()) : Tensor();
  if (!plain.defined() || !right.defined()) return plain.defined() == right.defined() ? 0 : kInfinity;
  const Tensor a = plain.detach().to(at::kCPU, at::kDouble), b = right.to(at::kCPU, at::kDouble);
  if (a.numel() == 0) return 0;
  const double difference = (a - b).abs().max().item<double>();
  const double scale = std::max(1.0, a.abs().max().item<double>());
  return std::isnan(difference) || std::isinf(scale) ? kInfinity : difference / scale;
}

/// What the first list has and the second has not.
void compare_names(const Names& plain, const Names& sharded, const std::string& kind, const char* has,
                   const char* lacks, std::vector<ParityDifference>& found) {
  for (const auto& [fqn, tensor] : plain) {
    const bool there = std::any_of(sharded.begin(), sharded.end(), [&](const auto& each) { return each.first == fqn; });
    if (!there) found.push_back({kind, fqn, 0, kInfinity, c10::str(has, " has ", fqn, ", ", lacks, " has not")});
  }
}

void compare_shapes(const Names& plain, const Names& sharded, std::vector<ParityDifference>& found) {
  for (const auto& [fqn, tensor] : plain) {
    for (const auto& [other_fqn, other] : sharded) {
      if (fqn == other_fqn && tensor.sizes() != other.sizes()) {
        found.push_back(
            {"shape", fqn, 0, kInfinity,
             c10::str(fqn, " is ", tensor.sizes(), " in the plain model and ", other.sizes(), " in the sharded one")});
      }
    }
  }
}

std::vector<ParityDifference> compare_models(const torch::nn::Module& plain, const torch::nn::Module& sharded) {
  std::vector<ParityDifference> found;
  const char *of_plain = "the plain model", *of_sharded = "the sharded model";
  const Names a = parameters_of(plain), b = parameters_of(sharded), c = buffers_of(plain), d = buffers_of(sharded);
  compare_names(a, b, "parameter names", of_plain, of_sharded, found);
  compare_names(b, a, "parameter names", of_sharded, of_plain, found);
  compare_shapes(a, b, found);
  compare_names(c, d, "buffer names", of_plain, of_sharded, found);
  compare_names(d, c, "buffer names", of_sharded, of_plain, found);
  compare_shapes(c, d, found);
  return found;
}

/// What gives other numbers by design.
std::vector<std::string> notes_on(const torch::nn::Module& model, bool split_batch) {
  std::string dropout, batch_norm;
  for (const auto& named : model.named_modules()) {
    const torch::nn::Module* each = named.value().get();
    if (!each->is_training()) continue;
    const auto drops = [&](auto* module) { return module != nullptr && module->options.p() > 0; };
    const auto* attention = dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(each);
    if (drops(dynamic_cast<const torch::nn::DropoutImpl*>(each)) ||
        drops(dynamic_cast<const torch::nn::Dropout2dImpl*>(each)) ||
        drops(dynamic_cast<const torch::nn::Dropout3dImpl*>(each)) ||
        drops(dynamic_cast<const torch::nn::AlphaDropoutImpl*>(each)) ||
        drops(dynamic_cast<const torch::nn::FeatureAlphaDropoutImpl*>(each)) ||
        (attention != nullptr && attention->options.dropout() > 0)) {
      dropout += (dropout.empty() ? "" : ", ") + named.key();
    }
    if (dynamic_cast<const torch::nn::BatchNorm1dImpl*>(each) ||
        dynamic_cast<const torch::nn::BatchNorm2dImpl*>(each) ||
        dynamic_cast<const torch::nn::BatchNorm3dImpl*>(each)) {
      batch_norm += (batch_norm.empty() ? "" : ", ") + named.key();
    }
  }
  std::vector<std::string> notes;
  if (!dropout.empty()) {
    notes.push_back(c10::str("dropout draws other numbers in the two models, so they differ by design: set its ",
                             "probability to 0, or call eval(), in both factories (", dropout, ")"));
  }
  if (!batch_norm.empty() && split_batch) {
    notes.push_back(c10::str("batch norm uses the statistics of the rows that it sees, a rank's beside the whole ",
                             "batch: call eval() on it in both factories, or pass .split_batch = false (", batch_norm,
                             ")"));
  }
  return notes;
}

void check_side(const ParitySide& side, const char* which) {
  FSDP2_CHECK(side.module && side.optimizer && side.loss, kInvalidArgument, "[check_parity] ", which,
              " returned a side without ",
              !side.module      ? "a module"
              : !side.optimizer ? "an optimizer"
                                : "a loss",
              "; expected what parity_side(model, optimizer, loss) gives");
}

/// Rank 0's values on all ranks: the factories may have drawn from other seeds.
void make_equal(torch::nn::Module& plain, torch::nn::Module& sharded) {
  const at::NoGradGuard no_grad;
  for (const Names& names : {parameters_of(plain), buffers_of(plain)}) {
    for (const auto& [fqn, tensor] : names) {
      FSDP2_CHECK(!tensor.is_meta(), kInvalidArgument, "[check_parity] ", fqn,
                  " of the plain model is on meta; make_plain returns a model with values");
      Tensor values = tensor.detach().contiguous().to(local_device());
      broadcast(values, 0);
      tensor.detach().copy_(values);
    }
  }
  set_model_state_dict(sharded, get_model_state_dict(plain), {.full_state_dict = true});
}

ParityBatch moved(const ParityBatch& batch, const torch::nn::Module& module) {
  const auto params = module.parameters();
  ParityBatch result;
  for (const Tensor& tensor : batch) result.push_back(params.empty() ? tensor : tensor.to(params.front().device()));
  return result;
}

ParityBatch rows_of_this_rank(const ParityBatch& batch) {
  const int64_t ranks = get_world_size(), rank = get_rank();
  ParityBatch mine;
  for (const Tensor& tensor : batch) {
    FSDP2_CHECK(tensor.dim() > 0 && tensor.size(0) % ranks == 0, kInvalidArgument,
                "[check_parity] a tensor of the batch is ", tensor.sizes(), "; its dim 0 must be a multiple of the ",
                ranks, " ranks, each of which gets its rows (or pass .split_batch = false)");
    mine.push_back(tensor.narrow(0, rank * (tensor.size(0) / ranks), tensor.size(0) / ranks));
  }
  return mine;
}

Tensor loss_of(const ParitySide& side, const ParityBatch& batch, const char* which) {
  side.optimizer->zero_grad();
  const Tensor loss = side.loss(moved(batch, *side.module));
  FSDP2_CHECK(loss.defined() && loss.numel() == 1, kInvalidArgument, "[check_parity] the loss of ", which, " is ",
              loss.defined() ? c10::str("of shape ", loss.sizes()) : "undefined", "; expected a scalar");
  loss.backward();
  return loss.detach();
}

/// One kind of tensor, compared parameter by parameter; the largest difference of any rank counts on all.
class Comparison {
 public:
  Comparison(const Names& plain, const Names& sharded) : plain_(plain), sharded_(sharded) {}

  template <class Of>
  void add(const char* kind, Of&& of) {
    for (const auto& [fqn, tensor] : plain_) {
      // Under its own name: holders may list parameters in another order.
      const auto other = std::find_if(sharded_.begin(), sharded_.end(),
                                      [&, &name = fqn](const auto& each) { return each.first == name; });
      add(kind, fqn, difference_of(of(tensor), of(other->second)));
    }
  }
  void add(const char* kind, const std::string& fqn, double difference) {
    rows_.push_back({kind, fqn, 0, difference, ""});
  }

  /// Those beyond the tolerance. Collective.
  std::vector<ParityDifference> finish(int64_t step, double tolerance, double& largest) {
    Tensor all = at::empty({static_cast<int64_t>(rows_.size())}, at::kDouble);
    for (size_t i = 0; i < rows_.size(); ++i) all.data_ptr<double>()[i] = rows_[i].difference;
    Tensor there = all.to(local_device());
    all_reduce(there, ReduceOp::MAX);
    all = there.to(at::kCPU);
    std::vector<ParityDifference> beyond;
    for (size_t i = 0; i < rows_.size(); ++i) {
      ParityDifference& row = rows_[i];
      row.step = step;
      row.difference = all.data_ptr<double>()[i];
      largest = std::max(largest, row.difference);
      if (row.difference <= tolerance) continue;
      row.text =
          c10::str(row.kind, row.fqn.empty() ? "" : " of " + row.fqn, " differs in step ", step,
                   std::isinf(row.difference) ? c10::str(": it is missing, or not finite, on one side")
                                              : c10::str(" by ", row.difference, " where ", tolerance, " is allowed"));
      beyond.push_back(row);
    }
    return beyond;
  }

 private:
  const Names &plain_, &sharded_;
  std::vector<ParityDifference> rows_;
};

double mean_over_ranks(const Tensor& loss) {
  Tensor sum = loss.to(at::kDouble).reshape({1}).to(local_device());
  all_reduce(sum);
  return sum.item<double>() / get_world_size();
}

/// A sum over the samples where a mean is meant is off by the number of ranks.
void hint_at_sums(const Names& plain, const Names& sharded, ParityReport& report) {
  const at::NoGradGuard no_grad;
  const double ranks = get_world_size();
  bool all = ranks > 1, any = false;
  for (const auto& [fqn, tensor] : plain) {
    for (const auto& [other_fqn, other] : sharded) {
      if (fqn != other_fqn || !tensor.grad().defined() || !other.grad().defined()) continue;
      const Tensor a = tensor.grad().to(at::kCPU, at::kDouble);
      const Tensor b = plain_of(other.grad().detach()).to(at::kCPU, at::kDouble);
      const double scale = a.abs().max().item<double>();
      all = all && (a - ranks * b).abs().max().item<double>() <= 1e-3 * scale;
      any |= scale > 0;
    }
  }
  if (all && any) {
    report.notes.push_back(c10::str("the plain gradients are ", ranks, " times the sharded ones: the loss is a sum ",
                                    "over the samples; make it a mean, or call set_gradient_divide_factor(1) on every "
                                    "sharded module"));
  }
}

/// A rank whose own models agree stops with the others.
void share_differences(std::vector<ParityDifference>& found) {
  const auto texts = all_gather_strings(found.empty() ? "" : found.front().kind + "\n" + found.front().text);
  for (size_t rank = 0; rank < texts.size() && found.empty(); ++rank) {
    if (texts[rank].empty()) continue;
    const size_t end = texts[rank].find('\n');
    found.push_back(
        {texts[rank].substr(0, end), "", 0, kInfinity, c10::str("on rank ", rank, ": ", texts[rank].substr(end + 1))});
  }
}

}  // namespace

ParityReport check_parity(const std::function<ParitySide()>& make_plain,
                          const std::function<ParitySide()>& make_sharded, const ParityInputs& inputs, int64_t steps,
                          double tolerance, const ParityOptions& options) {
  FSDP2_CHECK(is_initialized(), kUsage, "[check_parity] needs a process group: call fsdp2::init_process_group() first");
  FSDP2_CHECK(steps >= 1, kInvalidArgument, "[check_parity] steps is ", steps, "; expected at least 1");
  FSDP2_CHECK(tolerance >= 0, kInvalidArgument, "[check_parity] tolerance is ", tolerance, "; expected 0 or more");
  const ParitySide plain = make_plain(), sharded = make_sharded();
  check_side(plain, "make_plain");
  check_side(sharded, "make_sharded");
  ParityReport report;
  report.notes = notes_on(*sharded.module, options.split_batch);
  for (const std::string& note : report.notes) {
    if (get_rank() == 0) FSDP2_LOG_WARN("[check_parity] ", note);
  }
  report.differences = compare_models(*plain.module, *sharded.module);
  share_differences(report.differences);
  if (!report.differences.empty()) {
    report.largest_difference = kInfinity;
    return report;
  }
  if (options.copy_weights) make_equal(*plain.module, *sharded.module);
  const Names of_plain = parameters_of(*plain.module), of_sharded = parameters_of(*sharded.module);
  const auto grad_of = [](const Tensor& param) { return param.grad(); };
  const auto value_of = [](const Tensor& param) { return param; };
  for (int64_t step = 0; step < steps && report.differences.empty(); ++step) {
    const ParityBatch batch = inputs.at(step);
    const Tensor plain_loss = loss_of(plain, batch, "the plain side");
    const Tensor sharded_loss =
        loss_of(sharded, options.split_batch ? rows_of_this_rank(batch) : batch, "the sharded side");
    report.plain_losses.push_back(plain_loss.item<double>());
    report.sharded_losses.push_back(mean_over_ranks(sharded_loss));
    Comparison comparison(of_plain, of_sharded);
    comparison.add("loss", "",
                   difference_of(plain_loss.reshape({1}), at::full({1}, report.sharded_losses.back(), at::kDouble)));
    comparison.add("gradient", grad_of);
    plain.optimizer->step();
    sharded.optimizer->step();
    comparison.add("weight", value_of);
    report.differences = comparison.finish(step, tolerance, report.largest_difference);
    if (!report.differences.empty()) hint_at_sums(of_plain, of_sharded, report);
  }
  report.ok = report.differences.empty();
  return report;
}

std::string ParityReport::to_string() const {
  constexpr size_t kMost = 10;
  std::string text =
      c10::str("check_parity: ", ok ? "equal" : "different", " after ", plain_losses.size(),
               plain_losses.size() == 1 ? " step" : " steps", ", largest difference ", largest_difference, "\n");
  for (size_t i = 0; i < plain_losses.size(); ++i) {
    text += c10::str("  step ", i, "  loss ", plain_losses[i], " plain, ", sharded_losses[i], " sharded\n");
  }
  for (size_t i = 0; i < std::min(kMost, differences.size()); ++i) {
    text += c10::str(i == 0 ? "  first difference: " : "  also: ", differences[i].text, "\n");
  }
  if (differences.size() > kMost) text += c10::str("  and ", differences.size() - kMost, " more\n");
  for (const std::string& note : notes) text += c10::str("  note: ", note, "\n");
  return text;
}

}  // namespace fsdp2
