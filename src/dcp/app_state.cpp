#include <fsdp2/dcp/app_state.h>

#include <utility>

namespace fsdp2 {

namespace {

class AppState : public dcp::Stateful {
 public:
  AppState(ModuleRef module, std::vector<torch::optim::Optimizer*> optimizers, StateDictOptions options)
      : module_(module), optimizers_(std::move(optimizers)), options_(std::move(options)) {}

  dcp::StateDict state_dict() override {
    auto [model, optim] = get_state_dict(module_, optimizers_, options_);
    return {{"model", std::move(model)}, {"optim", std::move(optim)}};
  }
  void load_state_dict(const dcp::StateDict& state) override {
    set_state_dict(module_, optimizers_, state.at("model").dict(), state.at("optim").dict(), options_);
  }

 private:
  ModuleRef module_;
  std::vector<torch::optim::Optimizer*> optimizers_;
  StateDictOptions options_;
};

}  // namespace

std::shared_ptr<dcp::Stateful> app_state(ModuleRef module, torch::optim::Optimizer& optimizer,
                                         const StateDictOptions& options) {
  return app_state(module, std::vector<torch::optim::Optimizer*>{&optimizer}, options);
}

std::shared_ptr<dcp::Stateful> app_state(ModuleRef module, const std::vector<torch::optim::Optimizer*>& optimizers,
                                         const StateDictOptions& options) {
  return std::make_shared<AppState>(module, optimizers, options);
}

}  // namespace fsdp2
