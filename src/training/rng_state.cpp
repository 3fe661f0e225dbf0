#include <fsdp2/rng_state.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <fsdp2/error.h>
#include <fsdp2/process_group.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fsdp2 {
namespace {

struct NamedGenerator {
  std::string name;
  at::Generator generator;
};

std::vector<NamedGenerator> generators() {
  std::vector<NamedGenerator> all{{"cpu", at::detail::getDefaultCPUGenerator()}};
  const c10::Device device = local_device();
  if (device.type() != c10::kCPU)
    all.push_back(
        {c10::DeviceTypeName(device.type(), /*lower_case=*/true), at::globalContext().defaultGenerator(device)});
  return all;
}

at::Tensor state_of(at::Generator& generator) {
  const std::scoped_lock lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

dcp::StateDict RngState::state_dict() {
  dcp::StateDict state;
  for (NamedGenerator& each : generators()) state[each.name] = state_of(each.generator);
  return state;
}

void RngState::load_state_dict(const dcp::StateDict& state) {
  std::vector<std::pair<at::Generator, at::Tensor>> accepted;
  for (NamedGenerator& each : generators()) {
    const at::Tensor& saved = state.at(each.name).tensor();
    const int64_t bytes = state_of(each.generator).numel();
    FSDP2_CHECK(saved.scalar_type() == at::kByte && saved.dim() == 1 && saved.numel() == bytes, kInvalidArgument,
                "[rng_state] the state of '", each.name, "' is a ", saved.scalar_type(), " tensor of shape ",
                saved.sizes(), "; expected are ", bytes, " bytes (uint8), as torch.get_rng_state() gives them");
    at::Tensor content = saved.to(at::kCPU).contiguous();
    try {
      at::Generator trial = each.generator.clone();
      trial.set_state(content);
    } catch (const c10::Error& error) {
      FSDP2_THROW(kInvalidArgument, "[rng_state] the generator '", each.name,
                  "' refuses its state: ", error.what_without_backtrace());
    }
    accepted.emplace_back(each.generator, std::move(content));
  }
  for (auto& [generator, content] : accepted) {
    const std::scoped_lock lock(generator.mutex());
    generator.set_state(content);
  }
}

}  // namespace fsdp2
