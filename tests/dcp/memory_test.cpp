// labels: ranks
// Loading holds at most one tensor beyond the destination, however big the model is.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <fstream>
#include <string>

#include "support/process_status.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

constexpr int64_t kMiB = 1 << 20;

int64_t status_bytes(const std::string& field) { return process_status(field) * 1024; }

/// Peak of resident memory during `body`, beyond what was resident before.
template <class Body>
int64_t peak_of(Body body) {
  std::ofstream("/proc/self/clear_refs") << "5";  // resets the peak
  const int64_t before = status_bytes("VmRSS");
  body();
  return status_bytes("VmHWM") - before;
}

struct ManyImpl : torch::nn::Module {
  ManyImpl() {
    big = register_parameter("big", torch::zeros({16, kMiB}));  // 64 MiB
    for (int i = 0; i < 24; ++i) {
      register_module("layer" + std::to_string(i),
                      torch::nn::Linear(torch::nn::LinearOptions(2048, 1024).bias(false)));  // 8 MiB
    }
  }
  torch::Tensor big;
};
FSDP2_MODULE(Many);

TEST(DcpMemory, LoadIntoMetaModelNeedsOneTensorMoreThanTheModel) {
  const TempDir folder;
  const std::string path = folder.path() + "/ckpt";
  ASSERT_TRUE(run_ranks(1, [&](int) {
    Many model;
    dcp::save({{"x", torch::ones({2})}}, path + "_warm");  // pages in the code
    const int64_t extra = peak_of([&] { dcp::save(get_model_state_dict(model), path); });
    EXPECT_LT(extra, 24 * kMiB);  // memory is written from where it lies
  }));
  ASSERT_TRUE(run_ranks(2, [&](int) {
    Many model = nullptr;
    {
      MetaDeviceGuard meta;
      model = Many();
    }
    for (const auto& child : model->children()) fully_shard_module(*child, {});
    fully_shard(model);
    dcp::save({{"x", torch::ones({2})}}, path + "_small");  // pages in the code
    dcp::StateDict small{{"x", torch::zeros({2})}};
    dcp::load(small, path + "_small");
    const int64_t shards = (64 + 24 * 8) / 2 * kMiB;
    const int64_t extra = peak_of([&] {
      dcp::StateDict state = get_model_state_dict(model);
      dcp::load(state, path);
      set_model_state_dict(model, state);
    });
    // One rank saved `big` whole: reading it takes 64 MiB once; the allocator keeps some holes.
    EXPECT_LT(extra - shards, (64 + 40) * kMiB) << "twice the model would be " << shards / kMiB << " MiB more";
  }));
}

}  // namespace
}  // namespace fsdp2::testing
