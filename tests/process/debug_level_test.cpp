// labels: ranks
// backends: gloo, shm
// FSDP2_DEBUG: what ranks compare at each level.

#include <cstdlib>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

RANKS_TEST(DebugLevel, TwoComparesEveryCall, 3) {
  ::setenv("FSDP2_DEBUG", "2", 1);
  Tensor small = torch::ones({4}), large = torch::ones({12});
  fsdp2::all_reduce(small);
  EXPECT_TRUE(small.eq(3).all().item<bool>());
  const auto diverge = [&] {
    if (rank == 1) {
      fsdp2::all_gather_into_tensor(large, small);
    } else {
      fsdp2::all_reduce(small);
    }
  };
  EXPECT_FSDP2_ERROR(diverge(), kUsage,
                     "rank 0 of it all_reduce, 16 bytes of Float; rank 1 all_gather, 48 bytes of Float");
  fsdp2::all_reduce(large);  // nobody waits in the call that was refused
  EXPECT_TRUE(large.eq(3).all().item<bool>());
}

RANKS_TEST(DebugLevel, AModelTrainsWithTwo, 2) {
  ::setenv("FSDP2_DEBUG", "2", 1);
  torch::manual_seed(1);
  Net net(2), whole_net(2);
  copy_state(*net, *whole_net);
  shard(net);
  const Tensor tokens = torch::randint(NetImpl::kVocab, {4, 4});
  loss_of(net, tokens).backward();
  loss_of(whole_net, tokens).backward();
  EXPECT_LE(max_difference(whole(net->head->weight.grad()), whole_net->head->weight.grad()), 1e-6);
}

/// Writes through a raw pointer inside forward, which no version counter tells.
struct WriterImpl : torch::nn::Module {
  WriterImpl() { weight = register_parameter("weight", torch::ones({4, 2})); }
  Tensor forward(const Tensor& x) {
    const Tensor result = x * weight.sum();
    if (write) weight.data_ptr<float>()[4 * fsdp2::get_rank()] = 7;  // ranks may share the memory
    return result;
  }
  Tensor weight;
  bool write = false;
};

RANKS_TEST(DebugLevel, OneComparesTheBytesOfWholeParameters, 2) {
  ::setenv("FSDP2_DEBUG", "1", 1);
  auto writer = std::make_shared<WriterImpl>();
  fsdp2::fully_shard(writer, {.reshard_after_forward = true});
  EXPECT_EQ(fsdp2::call(writer, torch::ones({1})).item<float>(), 8);
  writer->write = true;
  EXPECT_FSDP2_ERROR(fsdp2::call(writer, torch::ones({1})), kUsage, "parameter weight was written in place while it");
}

RANKS_TEST(DebugLevel, OtherValuesAreRefused, 2) {
  ::setenv("FSDP2_DEBUG", "yes", 1);
  auto writer = std::make_shared<WriterImpl>();
  fsdp2::fully_shard(writer);
  EXPECT_FSDP2_ERROR(fsdp2::call(writer, torch::ones({1})), kInvalidArgument,
                     "FSDP2_DEBUG is \"yes\"; expected 0, 1 or 2");
}

}  // namespace
