// labels: ranks
// backends: gloo, shm
// A user's own collectives, memory from the process group, and what excludes what.

#include "fsdp/parity.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

struct Seen {
  int allocations = 0;
  std::vector<std::pair<int64_t, int64_t>> calls;  // elements in and out
  std::vector<at::ScalarType> dtypes;
  std::vector<c10d::ReduceOp::RedOpType> ops;
  int group_size = 0;
};

class NotingAllGather : public fsdp2::AllGather {
 public:
  explicit NotingAllGather(Seen& seen) : seen_(seen) {}
  Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    ++seen_.allocations;
    return torch::empty(sizes, options);
  }
  c10::intrusive_ptr<c10d::Work> operator()(Tensor& out, const Tensor& in, const fsdp2::ProcessGroup& group) override {
    seen_.calls.emplace_back(in.numel(), out.numel());
    seen_.dtypes.push_back(in.scalar_type());
    seen_.group_size = group->getSize();
    std::vector<std::vector<Tensor>> parts{out.view({-1}).chunk(group->getSize())};
    std::vector<Tensor> inputs{in.view({-1})};
    return group->allgather(parts, inputs);  // under way
  }

 private:
  Seen& seen_;
};

/// Done when it returns. Averages by hand: Gloo cannot.
class NotingReduceScatter : public fsdp2::ReduceScatter {
 public:
  explicit NotingReduceScatter(Seen& seen, double scale = 1) : seen_(seen), scale_(scale) {}
  Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    ++seen_.allocations;
    return torch::empty(sizes, options);
  }
  c10::intrusive_ptr<c10d::Work> operator()(Tensor& out, const Tensor& in, const fsdp2::ProcessGroup& group,
                                            fsdp2::ReduceOp op) override {
    seen_.calls.emplace_back(in.numel(), out.numel());
    seen_.dtypes.push_back(in.scalar_type());
    seen_.ops.push_back(op.op_);
    seen_.group_size = group->getSize();
    fsdp2::reduce_scatter_tensor(out, in, fsdp2::ReduceOp::SUM, group);
    out.mul_(op.op_ == fsdp2::ReduceOp::AVG ? scale_ / group->getSize() : scale_);
    return {};
  }

 private:
  Seen& seen_;
  double scale_;
};

struct Model {
  explicit Model(const fsdp2::FullyShardOptions& options = {})
      : layer(linear(3, 5, true)), handle(fsdp2::fully_shard(layer, options)) {}
  void step(double value) { layer(torch::full({1, 3}, value)).sum().backward(); }
  void expect(double value, const char* where = "") {
    EXPECT_EQ(max_difference(whole(layer->weight.grad()), torch::full({5, 3}, value)), 0) << where;
  }
  Linear layer;
  fsdp2::FSDPModule handle;
};

RANKS_TEST(CustomComms, SeeTheFlatBuffersAndCarryTheData, 2) {
  for (const bool narrow : {false, true}) {
    Seen gathers, reductions;
    fsdp2::FullyShardOptions options{.reshard_after_forward = true};
    if (narrow) options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    torch::manual_seed(3);
    Model model(options);
    const Tensor weight = whole(model.layer->weight);
    model.handle.set_custom_all_gather(std::make_shared<NotingAllGather>(gathers));
    model.handle.set_custom_reduce_scatter(std::make_shared<NotingReduceScatter>(reductions));
    for (int i = 0; i < 2; ++i) {
      model.step(rank + 1);
      model.expect(1.5, "average");
      model.layer->zero_grad();
    }
    // 5 rows are padded to 6: 3 rows of 3 and 3 of the bias on each rank.
    EXPECT_EQ(gathers.calls, (std::vector<std::pair<int64_t, int64_t>>(4, {12, 24})));
    EXPECT_EQ(reductions.calls, (std::vector<std::pair<int64_t, int64_t>>(2, {24, 12})));
    for (const auto dtype : gathers.dtypes) EXPECT_EQ(dtype, narrow ? torch::kBFloat16 : torch::kFloat);
    for (const auto dtype : reductions.dtypes) EXPECT_EQ(dtype, torch::kFloat);
    EXPECT_GE(gathers.allocations, 1);
    EXPECT_GE(reductions.allocations, 1);
    EXPECT_EQ(gathers.group_size, 2);
    EXPECT_EQ(reductions.group_size, 2);
    EXPECT_EQ(max_difference(whole(model.layer->weight), weight), 0);
  }
}

RANKS_TEST(CustomComms, GatherAlsoFromShardsKeptOverFewerRanks, 4) {
  Seen gathers, reductions;
  Model model({.reshard_after_forward = 2});
  model.handle.set_custom_all_gather(std::make_shared<NotingAllGather>(gathers));
  model.handle.set_custom_reduce_scatter(std::make_shared<NotingReduceScatter>(reductions));
  model.handle.set_separate_reduce_scatter_group();
  model.step(rank + 1);
  model.expect(2.5);
  // 5 rows over 4 ranks are 2 each, over 2 ranks 3 each.
  EXPECT_EQ(gathers.calls, (std::vector<std::pair<int64_t, int64_t>>{{8, 32}, {12, 24}}));
  EXPECT_EQ(gathers.group_size, 2);
  EXPECT_EQ(reductions.calls, (std::vector<std::pair<int64_t, int64_t>>{{32, 8}}));
  EXPECT_EQ(reductions.group_size, 4);
  model.handle.set_custom_all_gather(nullptr);
  model.handle.set_custom_reduce_scatter(nullptr);
  model.layer->zero_grad();
  model.step(rank + 1);
  model.expect(2.5);
  EXPECT_EQ(gathers.calls.size(), 2u);
  EXPECT_EQ(reductions.calls.size(), 1u);
}

// What it returns is what becomes the gradient.
RANKS_TEST(CustomComms, DecideTheResult, 2) {
  Seen seen;
  Model model;
  model.handle.set_custom_reduce_scatter(std::make_shared<NotingReduceScatter>(seen, 10));
  model.step(rank + 1);
  model.expect(15);
}

RANKS_TEST(CustomComms, AreAskedForSumsWhereOnlySumsAreWanted, 4) {
  for (const bool replicas : {false, true}) {
    for (const double factor : {0., 4., 8.}) {
      Seen seen;
      fsdp2::FullyShardOptions options;
      if (replicas) options.mesh = fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
      Model model(options);
      model.handle.set_custom_reduce_scatter(std::make_shared<NotingReduceScatter>(seen));
      model.handle.set_force_sum_reduction_for_comms(true);
      if (factor != 0) model.handle.set_gradient_divide_factor(factor);
      model.step(rank + 1);
      model.expect(10 / (factor == 0 ? 4 : factor));
      ASSERT_EQ(seen.ops.size(), 1u);
      EXPECT_EQ(seen.ops[0], fsdp2::ReduceOp::SUM);
      EXPECT_EQ(seen.group_size, replicas ? 2 : 4);
    }
  }
}

void expect_not_asked(int rank, const std::optional<fsdp2::DeviceMesh>& mesh, double expected) {
  Seen gathers, reductions;
  Model model({.mesh = mesh});
  model.handle.set_custom_all_gather(std::make_shared<NotingAllGather>(gathers));
  model.handle.set_custom_reduce_scatter(std::make_shared<NotingReduceScatter>(reductions));
  model.step(rank + 1);
  model.expect(expected);
  EXPECT_TRUE(gathers.calls.empty());
  EXPECT_TRUE(reductions.calls.empty());
}
RANKS_TEST(CustomComms, AreNotAskedOnOneRank, 1) { expect_not_asked(rank, {}, 1); }
RANKS_TEST(CustomComms, AreNotAskedWhereNothingIsSharded, 2) {
  expect_not_asked(rank, fsdp2::init_device_mesh(torch::kCPU, {2, 1}, {"replicate", "shard"}), 1.5);
}

RANKS_TEST(CustomComms, ComeAfterMemoryOfTheProcessGroupAndNotBefore, 2) {
  Model model;
  model.handle.set_allocate_memory_from_process_group_for_comm(true);
  model.step(rank + 1);  // Gloo has none to give: ordinary memory
  model.expect(1.5);
  model.layer->zero_grad();
  Seen seen;
  model.handle.set_custom_all_gather(std::make_shared<NotingAllGather>(seen));  // takes its place
  EXPECT_THROW(model.handle.set_allocate_memory_from_process_group_for_comm(true), fsdp2::Error);
  model.step(rank + 1);
  model.expect(1.5);
  EXPECT_FALSE(seen.calls.empty());

  Model other;
  other.handle.set_custom_reduce_scatter(std::make_shared<NotingReduceScatter>(seen));
  EXPECT_THROW(other.handle.set_allocate_memory_from_process_group_for_comm(true), fsdp2::Error);
}

// An event after the optimizer is waited for by streams that a CPU has not.
RANKS_TEST(CustomComms, AnEventAfterTheOptimizerChangesNothingOnCpu, 2) {
  Model model;
  for (int i = 0; i < 2; ++i) {
    model.handle.set_post_optim_event(std::make_shared<c10::Event>(c10::DeviceType::CPU));
    model.step(rank + 1);
    model.expect(1.5 * (i + 1));
  }
  model.handle.set_post_optim_event(nullptr);
}

RANKS_TEST(CustomComms, SymmetricMemoryNeedsADeviceThatHasIt, 2) {
  Model model;
  EXPECT_THROW(model.handle.set_symm_mem_for_comm("NCCL"), fsdp2::Error);
  EXPECT_THROW(model.handle.set_symm_mem_for_comm("NVSHMEM"), fsdp2::Error);
  model.step(rank + 1);  // and nothing is left half set
  model.expect(1.5);
}

}  // namespace
