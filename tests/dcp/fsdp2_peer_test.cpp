// labels: peer, ranks
// timeout: 600
// A fully sharded model and its optimizer, both ways with Python's FSDP2 and its default, strict
// load.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>

#include "dcp/sample_state.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    one_row = register_parameter("one_row", torch::zeros({1, 8}));
    frozen = register_parameter("frozen", torch::zeros({3, 2}), /*requires_grad=*/false);
    register_buffer("steps", torch::zeros({2}, torch::kLong));
    up = register_module("up", torch::nn::Linear(5, 7));
    down = register_module("down", torch::nn::Linear(torch::nn::LinearOptions(7, 3).bias(false)));
    down->to(torch::kBFloat16);
    register_module("tied", down);
  }
  torch::Tensor one_row, frozen;
  torch::nn::Linear up = nullptr, down = nullptr;
};
FSDP2_MODULE(Net);

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, std::vector<torch::Tensor> params,
                                                        double lr) {
  using namespace torch::optim;
  if (name == "adamw") return std::make_unique<AdamW>(params, AdamWOptions(lr).amsgrad(true));
  if (name == "adam") return std::make_unique<Adam>(params, AdamOptions(lr));
  if (name == "sgd") return std::make_unique<SGD>(params, SGDOptions(lr).momentum(0.9));
  if (name == "plain_sgd") return std::make_unique<SGD>(params, SGDOptions(lr));
  if (name == "adagrad") return std::make_unique<Adagrad>(params, AdagradOptions(lr));
  return std::make_unique<RMSprop>(params, RMSpropOptions(lr).momentum(0.9).centered(true));
}

/// Python's parameters() gives tied parameters once.
std::vector<torch::Tensor> distinct_parameters(const Net& model) {
  std::vector<torch::Tensor> result;
  for (const torch::Tensor& param : model->parameters()) {
    const bool known =
        std::any_of(result.begin(), result.end(), [&](const torch::Tensor& other) { return other.is_same(param); });
    if (!known) result.push_back(param);
  }
  return result;
}

struct Trained {
  Net model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  Trained(const std::string& name, double lr) {
    fully_shard(model->up);
    fully_shard(model);
    optimizer = make_optimizer(name, distinct_parameters(model), lr);
  }
  dcp::StateDict states() {
    return {{"model", get_model_state_dict(model)}, {"optim", get_optimizer_state_dict(model, *optimizer)}};
  }
};

std::vector<std::string> sorted(std::vector<std::string> keys) {
  std::sort(keys.begin(), keys.end());
  return keys;
}

/// The order of tests/peer/dcp_fsdp2.py: seeds are the same on both sides.
template <class Visit>
void each_tensor(const dcp::StateDict& state, Visit visit) {
  const dcp::StateDict& model = state.at("model").dict();
  int64_t i = 0;
  for (const std::string& fqn : sorted(model.keys())) {
    visit(model.at(fqn).tensor(), fqn == "tied.weight" ? 0 : i, fqn);  // 0: down.weight
    ++i;
  }
  const dcp::StateDict& optim = state.at("optim").dict().at("state").dict();
  i = -1;
  for (const std::string& fqn : sorted(model.keys())) {
    ++i;
    if (!optim.contains(fqn)) continue;
    int64_t k = 0;
    for (const std::string& name : sorted(optim.at(fqn).dict().keys())) {
      if (name != "step") {
        visit(optim.at(fqn).dict().at(name).tensor(), 100 + 10 * i + k, fqn + "." + name);
      }
      ++k;
    }
  }
}

void fill(const torch::Tensor& tensor, int64_t seed, const std::string&) {
  const torch::Tensor full = rule_values(tensor.sizes().vec(), tensor.scalar_type(), seed);
  if (is_dtensor(tensor)) {
    const DTensor target(tensor);
    target.to_local().copy_(distribute_tensor(full, target.device_mesh(), target.placements()).to_local());
  } else {
    torch::Tensor(tensor).copy_(full);
  }
}

void save_ours(const std::string& folder, const std::string& name, int world) {
  const torch::NoGradGuard no_grad;
  Trained trained(name, 0.5);
  dcp::StateDict state = trained.states();
  each_tensor(state, fill);
  for (auto& [fqn, entry] : state["optim"].dict()["state"].dict()) {
    if (entry.dict().contains("step")) entry.dict()["step"] = torch::tensor(12.0f);
  }
  // Through the model and the optimizer, not around them.
  set_state_dict(trained.model, *trained.optimizer, state["model"].dict(), state["optim"].dict());
  dcp::save(trained.states(), folder + "/cpp_" + name + "_" + std::to_string(world));
}

void load_and_check(const std::string& path, const std::string& name) {
  const torch::NoGradGuard no_grad;
  Trained trained(name, 0.125);
  dcp::StateDict state = trained.states();
  const dcp::LoadReport report = dcp::load(state, path);
  EXPECT_TRUE(report.cast.empty() && report.reshaped.empty() && report.unexpected.empty()) << path;
  set_state_dict(trained.model, *trained.optimizer, state["model"].dict(), state["optim"].dict());
  state = trained.states();
  each_tensor(state, [&](const torch::Tensor& tensor, int64_t seed, const std::string& where) {
    const torch::Tensor full = is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
    EXPECT_TRUE(full.equal(rule_values(tensor.sizes().vec(), tensor.scalar_type(), seed))) << path << " " << where;
  });
  for (const auto& [fqn, entry] : state["optim"].dict()["state"].dict()) {
    if (!entry.dict().contains("step")) continue;
    EXPECT_EQ(entry.dict().at("step").tensor().item<float>(), 12) << path << " " << fqn;
  }
  EXPECT_EQ(trained.optimizer->param_groups()[0].options().get_lr(), 0.5) << path;
}

TEST(DcpFsdp2Peer, ModelAndOptimizerBothWays) {
  const TempDir folder;
  const std::vector<std::string> others = {"adam", "sgd", "plain_sgd", "adagrad", "rmsprop"};
  for (int world : {1, 2, 3, 4}) {
    ASSERT_TRUE(run_ranks(world, [&](int) {
      save_ours(folder.path(), "adamw", world);
      if (world != 2) return;
      for (const std::string& name : others) save_ours(folder.path(), name, world);
    }));
  }
  const ProcessResult python = run_python(test_file("peer/dcp_fsdp2.py"), {folder.path()}, std::chrono::seconds(400));
  ASSERT_EQ(python.exit_code, 0) << python.output;
  for (int world : {1, 2, 3, 4}) {
    ASSERT_TRUE(run_ranks(world, [&](int) {
      for (const char* writer : {"/py_", "/cpp_"}) {
        for (int saved : {1, 2, 3, 4})
          load_and_check(folder.path() + writer + "adamw_" + std::to_string(saved), "adamw");
        if (world != 2) continue;
        for (const std::string& name : others) load_and_check(folder.path() + writer + name + "_2", name);
      }
    }));
  }
}

}  // namespace
}  // namespace fsdp2::testing
