// labels: ranks
// Backend "fake": what collectives give without peers, and what a step of a sharded model asks for.

#include <gtest/gtest.h>

#include <cstdlib>

#include <fsdp2/fsdp2.h>

#include "fsdp/models.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

constexpr int64_t kFloatBytes = 4;

void join(int rank, int world_size) { init_process_group({.backend = "fake", .rank = rank, .world_size = world_size}); }

void expect_ok(const std::function<void()>& body) {
  ASSERT_TRUE(run_ranks(1, [&](int) { body(); }, {.init_process_group = false}));
}

torch::Tensor ints(std::vector<int64_t> values) { return torch::tensor(values); }

TEST(FakeBackend, GivesWhatEqualRanksWouldGive) {
  expect_ok([] {
    join(1, 4);
    EXPECT_EQ(get_rank(), 1);
    EXPECT_EQ(get_world_size(), 4);

    torch::Tensor gathered = torch::full({8}, -1, torch::kLong);
    all_gather_into_tensor(gathered, ints({5, 6}));
    EXPECT_TRUE(gathered.equal(ints({5, 6, 5, 6, 5, 6, 5, 6})));

    torch::Tensor part = torch::full({2}, -1, torch::kLong);
    const torch::Tensor whole = ints({0, 1, 10, 11, 20, 21, 30, 31});
    reduce_scatter_tensor(part, whole);
    EXPECT_TRUE(part.equal(ints({40, 44})));
    reduce_scatter_tensor(part, whole, ReduceOp::MAX);
    EXPECT_TRUE(part.equal(ints({10, 11})));

    torch::Tensor sum = torch::tensor({1.5, 2.0}), average = sum.clone(), product = sum.clone();
    all_reduce(sum);
    all_reduce(average, ReduceOp::AVG);
    all_reduce(product, ReduceOp::PRODUCT);
    EXPECT_TRUE(sum.equal(torch::tensor({6.0, 8.0})));
    EXPECT_TRUE(average.equal(torch::tensor({1.5, 2.0})));
    EXPECT_TRUE(product.equal(torch::tensor({5.0625, 16.0})));
    torch::Tensor bits = ints({6}), truth = torch::tensor({true});
    all_reduce(bits, ReduceOp::BXOR);
    all_reduce(truth);
    EXPECT_EQ(bits.item<int64_t>(), 0);
    EXPECT_TRUE(truth.item<bool>());

    torch::Tensor same = ints({3});
    broadcast(same, /*src=*/0);
    EXPECT_EQ(same.item<int64_t>(), 3);
    barrier();
    EXPECT_EQ(all_gather_strings("one"), std::vector<std::string>(4, "one"));
    EXPECT_EQ(all_gather_strings(""), std::vector<std::string>(4));
  });
}

TEST(FakeBackend, AnswersTheOtherOperationsOfC10d) {
  expect_ok([] {
    join(2, 3);
    const auto group = default_group()->getBackend(torch::kCPU);
    std::vector<torch::Tensor> mine{ints({7})}, slots{ints({0}), ints({0}), ints({0})};
    std::vector<std::vector<torch::Tensor>> lists{slots};
    group->allgather(lists, mine)->wait();
    EXPECT_EQ(lists[0][0].item<int64_t>(), 7);
    EXPECT_EQ(lists[0][2].item<int64_t>(), 7);

    torch::Tensor out = ints({0, 0, 0}), in = ints({1, 2, 3});
    std::vector<int64_t> even;
    group->alltoall_base(out, in, even, even)->wait();
    EXPECT_TRUE(out.equal(ints({3, 3, 3})));
    std::vector<int64_t> receives{1, 2, 1}, sends{1, 1, 1};
    out = ints({9, 9, 9, 9});
    group->alltoall_base(out, in, receives, sends)->wait();
    EXPECT_TRUE(out.equal(ints({3, 0, 0, 3})));  // what a rank unlike this one would send is not known

    std::vector<torch::Tensor> received{ints({4})};
    group->recv(received, 0, 0)->wait();
    EXPECT_EQ(received[0].item<int64_t>(), 0);
    group->send(mine, 0, 0)->wait();

    std::vector<torch::Tensor> scattered{ints({4})};
    std::vector<std::vector<torch::Tensor>> parts{{ints({1}), ints({2}), ints({3})}}, nothing;
    group->scatter(scattered, parts, {.rootRank = 2})->wait();
    EXPECT_EQ(scattered[0].item<int64_t>(), 3);
    group->scatter(scattered, nothing, {.rootRank = 0})->wait();
    EXPECT_EQ(scattered[0].item<int64_t>(), 0);

    const auto counts = fake_counts();
    EXPECT_EQ(counts.size(), 11);
    EXPECT_EQ(counts.at("all_gather").calls, 1);
    EXPECT_EQ(counts.at("all_gather").bytes, 3 * 8);
    EXPECT_EQ(counts.at("all_to_all").calls, 2);
    EXPECT_EQ(counts.at("all_to_all").bytes, 3 * 8 + 4 * 8);
    EXPECT_EQ(counts.at("send").bytes, 8);
    EXPECT_EQ(counts.at("recv").bytes, 8);
    EXPECT_EQ(counts.at("scatter").bytes, 2 * 3 * 8);
    EXPECT_EQ(counts.at("broadcast").calls, 0);
    reset_fake_counts();
    EXPECT_EQ(fake_counts().at("all_gather").calls, 0);
    EXPECT_EQ(fake_counts().at("all_gather").bytes, 0);
  });
}

TEST(FakeBackend, ListsOfWrongLengthsAreErrors) {
  expect_ok([] {
    join(2, 4);
    const auto group = default_group()->getBackend(torch::kCPU);
    torch::Tensor two = torch::ones({2, 3}), out = torch::zeros({2, 3}), four = torch::ones({4});
    std::vector<int64_t> even, short_list{1, 1}, uneven{1, 1, 1, 2}, negative{-1, 1, 2, 2}, good{0, 0, 0, 2};
    const auto refused = [&](std::vector<int64_t>& receives, std::vector<int64_t>& sends, const char* text) {
      EXPECT_FSDP2_ERROR(group->alltoall_base(out, two, receives, sends), kInvalidArgument, text);
    };
    refused(even, even, "2 rows for 4 ranks");
    refused(good, short_list, "got 2 tensors or lists; expected 4");
    refused(short_list, good, "got 2 tensors or lists; expected 4");
    refused(good, uneven, "add up to the rows");
    refused(negative, good, "a split size of -1");
    group->alltoall_base(out, two, good, good)->wait();

    using Tensors = std::vector<torch::Tensor>;
    Tensors one{four}, three{four, four, four};
    std::vector<Tensors> lists{three}, none;
    EXPECT_FSDP2_ERROR(group->alltoall(three, three, {}), kInvalidArgument, "all_to_all");
    EXPECT_FSDP2_ERROR(group->allgather(lists, one, {}), kInvalidArgument, "all_gather");
    EXPECT_FSDP2_ERROR(group->allgather(none, one, {}), kInvalidArgument, "all_gather");
    EXPECT_FSDP2_ERROR(group->allgather_coalesced(lists, one, {}), kInvalidArgument, "all_gather_coalesced");
    EXPECT_FSDP2_ERROR(group->allgather_into_tensor_coalesced(one, three, {}), kInvalidArgument, "coalesced");
    EXPECT_FSDP2_ERROR(group->gather(lists, one, {.rootRank = 2}), kInvalidArgument, "gather");
    EXPECT_FSDP2_ERROR(group->scatter(one, lists, {.rootRank = 2}), kInvalidArgument, "scatter");
    EXPECT_FSDP2_ERROR(group->scatter(one, none, {.rootRank = 2}), kInvalidArgument, "scatter");
    EXPECT_FSDP2_ERROR(group->reduce_scatter(one, lists, {}), kInvalidArgument, "reduce_scatter");
    EXPECT_FSDP2_ERROR(group->reduce_scatter_tensor_coalesced(one, three, {}), kInvalidArgument, "coalesced");
  });
}

TEST(FakeBackend, TakesRankAndSizeFromTheEnvironmentAndNeedsNoAddress) {
  expect_ok([] {
    ::setenv("RANK", "1000", 1);
    ::setenv("WORLD_SIZE", "1024", 1);
    ::unsetenv("MASTER_ADDR");
    ::unsetenv("MASTER_PORT");
    init_process_group({.backend = "fake"});
    EXPECT_EQ(get_rank(), 1000);
    EXPECT_EQ(get_world_size(), 1024);
    EXPECT_EQ(all_gather_strings("x"), std::vector<std::string>(1024, "x"));
    const ProcessGroup others = new_group({0, 1}), own = new_group({999, 1000});
    EXPECT_EQ(get_rank(others), -1);
    EXPECT_EQ(get_rank(own), 1);
    torch::Tensor two = ints({0, 0});
    all_gather_into_tensor(two, ints({8}), own);
    EXPECT_TRUE(two.equal(ints({8, 8})));
    EXPECT_EQ(fake_counts(own).at("all_gather").bytes, 16);  // each group counts its own
    destroy_process_group();
    join(0, 2);
    EXPECT_EQ(get_world_size(), 2);
  });
}

TEST(FakeBackend, OtherGroupsHaveNoCounts) {
  ASSERT_TRUE(run_ranks(1, [](int) { EXPECT_FSDP2_ERROR(fake_counts(), kInvalidArgument, "\"fake\""); }));
}

/// Elements that one rank of `world_size` pads `rows` rows of `inner` to, times all ranks.
int64_t padded(int64_t rows, int64_t inner, int64_t world_size) {
  return (rows + world_size - 1) / world_size * inner * world_size;
}

struct StepBytes {
  int64_t root, block;
};

/// Of Net: embed and head of 11 x 6; in a block up 13 x 6 and 13, down 6 x 13 and 6, norm 6 and 6.
StepBytes bytes_of_net(int64_t world) {
  return {kFloatBytes * 2 * padded(11, 6, world),
          kFloatBytes * (padded(13, 6, world) + padded(13, 1, world) + padded(6, 13, world) + 3 * padded(6, 1, world))};
}

void step(Net& net, torch::Device device) {
  const torch::Tensor tokens = torch::zeros({2, 5}, torch::TensorOptions(torch::kLong).device(device));
  loss_of(net, tokens).backward();
}

void expect_step_counts(const FakeCount& all_gather, const FakeCount& reduce_scatter, StepBytes bytes) {
  // The root is gathered once and kept, each of 3 blocks for forward and for backward.
  EXPECT_EQ(all_gather.calls, 1 + 2 * 3);
  EXPECT_EQ(all_gather.bytes, bytes.root + 2 * 3 * bytes.block);
  EXPECT_EQ(reduce_scatter.calls, 1 + 3);
  EXPECT_EQ(reduce_scatter.bytes, bytes.root + 3 * bytes.block);
}

TEST(FakeBackend, CountsTheStepOfAShardedModel) {
  EXPECT_EQ(bytes_of_net(8).root, 4 * 2 * 2 * 6 * 8);  // 11 rows become 2 on each of 8
  EXPECT_EQ(bytes_of_net(8).block, 960);
  EXPECT_EQ(bytes_of_net(1024).block, 4 * 1024 * (6 + 1 + 13 + 1 + 1 + 1));  // one row each
  expect_ok([] {
    ::setenv("FSDP2_DEBUG", "0", 1);  // its exchanges would be counted too
    for (const int world : {8, 1024}) {
      join(world - 1, world);
      Net net = shard(Net());
      step(net, torch::kCPU);  // reaches every check that is made once
      reset_fake_counts();
      reset_counters();
      step(net, torch::kCPU);
      const auto counts = fake_counts();
      expect_step_counts(counts.at("all_gather"), counts.at("reduce_scatter"), bytes_of_net(world));
      EXPECT_EQ(counts.at("all_reduce").calls, 0);
      const Counters ours = counters();
      EXPECT_EQ(ours.all_gathers, counts.at("all_gather").calls);
      EXPECT_EQ(ours.bytes, counts.at("all_gather").bytes + counts.at("reduce_scatter").bytes);
      destroy_process_group();
    }
  });
}

TEST(FakeBackend, CountsReplicasOnTheirOwnGroup) {
  expect_ok([] {
    ::setenv("FSDP2_DEBUG", "0", 1);
    join(77, 1024);
    const DeviceMesh mesh = init_device_mesh(torch::kCPU, {128, 8}, {"replicate", "shard"});
    Net net = shard(Net(), {.mesh = mesh});
    step(net, torch::kCPU);
    reset_fake_counts(mesh.get_group("shard"));
    reset_fake_counts(mesh.get_group("replicate"));
    step(net, torch::kCPU);
    const auto inside = fake_counts(mesh.get_group("shard")), between = fake_counts(mesh.get_group("replicate"));
    const StepBytes bytes = bytes_of_net(8);
    expect_step_counts(inside.at("all_gather"), inside.at("reduce_scatter"), bytes);
    EXPECT_EQ(between.at("all_reduce").calls, 1 + 3);
    EXPECT_EQ(between.at("all_reduce").bytes, (bytes.root + 3 * bytes.block) / 8);
    EXPECT_EQ(between.at("all_gather").calls, 0);
  });
}

struct PairImpl : torch::nn::Module {
  PairImpl() {
    up = register_module("up", linear(6, 13, /*bias=*/true));
    down = register_module("down", linear(13, 6));
    head = register_module("head", linear(6, 11));
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(down(up(x))); }
  Linear up{nullptr}, down{nullptr}, head{nullptr};
};
FSDP2_MODULE(Pair);

TEST(FakeBackend, AModelMayStayOnTheMetaDevice) {
  expect_ok([] {
    ::setenv("FSDP2_DEBUG", "0", 1);
    join(5, 1024);
    Pair pair = nullptr;
    {
      const MetaDeviceGuard meta;
      pair = Pair();
    }
    fully_shard(pair->up);
    fully_shard(pair->down);
    fully_shard(pair);
    const torch::Tensor x = torch::empty({4, 6}, torch::kMeta);
    pair(x).sum().backward();
    reset_fake_counts();
    reset_counters();
    pair(x).sum().backward();
    const auto counts = fake_counts();
    const int64_t root = kFloatBytes * 1024 * 6, both = kFloatBytes * 1024 * (6 + 1 + 13);  // one row each
    EXPECT_EQ(counts.at("all_gather").calls, 1 + 2 * 2);
    EXPECT_EQ(counts.at("all_gather").bytes, root + 2 * both);
    EXPECT_EQ(counts.at("reduce_scatter").calls, 1 + 2);
    EXPECT_EQ(counts.at("reduce_scatter").bytes, root + both);
    // The root and the larger of the others at least, everything at most; parameters without padding.
    EXPECT_GE(counters().unsharded_bytes_peak, kFloatBytes * (11 * 6 + 13 * 6 + 13));
    EXPECT_LE(counters().unsharded_bytes_peak, kFloatBytes * (11 * 6 + 13 * 6 + 13 + 6 * 13));
    for (const torch::Tensor& param : pair->parameters()) {
      EXPECT_TRUE(DTensor(param.grad()).to_local().is_meta());
      EXPECT_EQ(param.grad().sizes(), param.sizes());
    }
  });
}

}  // namespace
}  // namespace fsdp2::testing
