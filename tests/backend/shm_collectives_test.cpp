// labels: ranks
// Every collective of the shm backend, through c10d, against values that each rank computes for itself.

#include <numeric>

#include "backend/shm_ranks.h"
#include "support/tensors.h"

namespace {

using c10d::ReduceOp;
using fsdp2::ProcessGroup;
using fsdp2::testing::shm_ranks;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

// One value, odd sizes, one that needs several chunks of 256 KiB in every dtype.
const std::vector<int64_t> kSizes = {1, 1000, 150001};

/// Calls whose names differ between releases on c10d::ProcessGroup.
c10::intrusive_ptr<c10d::Backend> cpu(const ProcessGroup& group) { return group->getBackend(c10::DeviceType::CPU); }

/// What `rank` has: the same on whichever rank it is asked for. A stretch of random numbers, repeated.
Tensor data_of(int rank, at::ScalarType dtype, int64_t numel, int seed = 0) {
  static const Tensor random = [] {
    torch::manual_seed(11);
    return torch::randn({2 * 65521}, torch::kDouble) * 8;
  }();
  const int64_t offset = (7919 * rank + 104729 * int64_t{seed}) % 65521;
  const auto stretch = [&](int64_t count) {
    return random.repeat({(offset + count) / random.numel() + 1}).narrow(0, offset, count);
  };
  if (dtype == torch::kBool) return stretch(numel).gt(0);
  if (c10::isComplexType(dtype)) return at::view_as_complex(stretch(2 * numel).view({numel, 2}).clone()).to(dtype);
  if (c10::isIntegralType(dtype, false))
    return (stretch(numel) * 10000).to(torch::kLong).to(dtype);  // narrow ones wrap
  return stretch(numel).to(dtype).clone();
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
}

/// `op` over the ranks' values in their order: bf16 and fp16 in fp32, rounded once.
Tensor reduced(const Tensors& values, ReduceOp::RedOpType op, const std::vector<double>& factors = {}) {
  const auto dtype = values[0].scalar_type();
  const bool small = dtype == torch::kBFloat16 || dtype == torch::kHalf;
  const auto wide = [&](size_t i) {
    const Tensor value = small ? values[i].to(torch::kFloat) : values[i];
    return factors.empty() ? value.clone() : value * factors[i];
  };
  Tensor total = wide(0);
  for (size_t i = 1; i < values.size(); ++i) {
    const Tensor next = wide(i);
    const bool is_bool = dtype == torch::kBool;
    switch (op) {
      case ReduceOp::SUM:
      case ReduceOp::AVG:
      case ReduceOp::PREMUL_SUM:
        total = is_bool ? total.logical_or(next) : total + next;
        break;
      case ReduceOp::PRODUCT:
        total = is_bool ? total.logical_and(next) : total * next;
        break;
      case ReduceOp::MIN:
        total = at::minimum(total, next);
        break;
      case ReduceOp::MAX:
        total = at::maximum(total, next);
        break;
      case ReduceOp::BAND:
        total = total.bitwise_and(next);
        break;
      case ReduceOp::BOR:
        total = total.bitwise_or(next);
        break;
      case ReduceOp::BXOR:
        total = total.bitwise_xor(next);
        break;
      default:
        break;
    }
  }
  if (op == ReduceOp::AVG && c10::isComplexType(dtype)) {
    return at::view_as_complex(at::view_as_real(total) / static_cast<double>(values.size()));
  }
  if (op == ReduceOp::AVG) total = total / static_cast<double>(values.size());
  return total.to(dtype);
}

Tensors data_of_all(int size, at::ScalarType dtype, int64_t numel, int seed = 0) {
  Tensors all;
  for (int rank = 0; rank < size; ++rank) all.push_back(data_of(rank, dtype, numel, seed));
  return all;
}

void wait(const c10::intrusive_ptr<c10d::Work>& work) {
  work->wait();
  EXPECT_TRUE(work->isCompleted());
  EXPECT_TRUE(work->isSuccess());
}

void check_moves(const ProcessGroup& group, int rank, at::ScalarType dtype, int64_t numel) {
  const int size = group->getSize();
  const Tensors all = data_of_all(size, dtype, numel);
  const auto blank = [&](int64_t n) { return torch::zeros({n}, torch::kByte).repeat({1}).to(torch::kFloat).to(dtype); };
  const auto what = c10::str(dtype, " ", numel, " of ", size);
  const int root = size - 1;

  Tensor in = all[static_cast<size_t>(rank)].clone(), out = blank(numel * size);
  wait(cpu(group)->_allgather_base(out, in));
  EXPECT_TRUE(same_bits(out, at::cat(all))) << what;

  // In place: the input is a part of the output.
  out = blank(numel * size);
  Tensor part = out.narrow(0, rank * numel, numel);
  part.copy_(in);
  wait(cpu(group)->_allgather_base(out, part));
  EXPECT_TRUE(same_bits(out, at::cat(all))) << what;

  std::vector<Tensors> lists{{}};
  for (int i = 0; i < size; ++i) lists[0].push_back(blank(numel));
  Tensors ins{in};
  wait(group->allgather(lists, ins));
  for (int i = 0; i < size; ++i)
    EXPECT_TRUE(same_bits(lists[0][static_cast<size_t>(i)], all[static_cast<size_t>(i)])) << what;

  Tensors moving{rank == root ? in.clone() : blank(numel)};
  c10d::BroadcastOptions from_root;
  from_root.rootRank = root;
  wait(group->broadcast(moving, from_root));
  EXPECT_TRUE(same_bits(moving[0], all[static_cast<size_t>(root)])) << what;

  std::vector<Tensors> gathered;
  if (rank == root) {
    gathered.emplace_back();
    for (int i = 0; i < size; ++i) gathered[0].push_back(blank(numel));
  }
  c10d::GatherOptions to_root;
  to_root.rootRank = root;
  wait(group->gather(gathered, ins, to_root));
  for (int i = 0; rank == root && i < size; ++i) {
    EXPECT_TRUE(same_bits(gathered[0][static_cast<size_t>(i)], all[static_cast<size_t>(i)])) << what;
  }

  std::vector<Tensors> scattered;
  if (rank == root) scattered.push_back(all);
  Tensors mine{blank(numel)};
  c10d::ScatterOptions scatter_options;
  scatter_options.rootRank = root;
  wait(group->scatter(mine, scattered, scatter_options));
  EXPECT_TRUE(same_bits(mine[0], in)) << what;

  // Rank r sends its values, but for the first j, to rank j.
  Tensors sent, received;
  for (int other = 0; other < size; ++other) {
    sent.push_back(in.narrow(0, std::min<int64_t>(other, numel), numel - std::min<int64_t>(other, numel)).clone());
    received.push_back(blank(numel - std::min<int64_t>(rank, numel)));
  }
  wait(group->alltoall(received, sent));
  for (int other = 0; other < size; ++other) {
    const int64_t skip = std::min<int64_t>(rank, numel);
    EXPECT_TRUE(same_bits(received[static_cast<size_t>(other)],
                          all[static_cast<size_t>(other)].narrow(0, skip, numel - skip).clone()))
        << what;
  }
}

void check_reductions(const ProcessGroup& group, int rank, at::ScalarType dtype, ReduceOp::RedOpType op,
                      int64_t numel) {
  const int size = group->getSize();
  std::vector<double> factors;
  ReduceOp reduce_op;
  if (op == ReduceOp::PREMUL_SUM) {
    for (int i = 0; i < size; ++i) factors.push_back(0.25 * (i + 1));
    reduce_op.op_ = op;
    reduce_op.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(factors[static_cast<size_t>(rank)]);
  } else {
    reduce_op = ReduceOp(op);
  }
  const auto what = c10::str(dtype, " op ", static_cast<int>(op), " ", numel, " of ", size);
  const Tensors all = data_of_all(size, dtype, numel, 1);
  const Tensor expected = reduced(all, op, factors);

  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op;
  Tensors tensors{all[static_cast<size_t>(rank)].clone()};
  wait(group->allreduce(tensors, options));
  EXPECT_TRUE(same_bits(tensors[0], expected)) << "all_reduce " << what;

  c10d::ReduceOptions to_root;
  to_root.reduceOp = reduce_op;
  to_root.rootRank = 0;
  tensors = {all[static_cast<size_t>(rank)].clone()};
  wait(group->reduce(tensors, to_root));
  EXPECT_TRUE(same_bits(tensors[0], rank == 0 ? expected : all[static_cast<size_t>(rank)])) << "reduce " << what;

  c10d::ReduceScatterOptions scatter;
  scatter.reduceOp = reduce_op;
  Tensors parts;  // part r of every rank
  for (int other = 0; other < size; ++other) parts.push_back(data_of(other, dtype, numel, 2 + rank));
  Tensors inputs;  // this rank's parts
  for (int target = 0; target < size; ++target) inputs.push_back(data_of(rank, dtype, numel, 2 + target));
  Tensor out = at::empty_like(inputs[0]), in = at::cat(inputs);
  wait(cpu(group)->_reduce_scatter_base(out, in, scatter));
  EXPECT_TRUE(same_bits(out, reduced(parts, op, factors))) << "reduce_scatter " << what;
  Tensors outs{at::empty_like(inputs[0])};
  std::vector<Tensors> lists{inputs};
  wait(group->reduce_scatter(outs, lists, scatter));
  EXPECT_TRUE(same_bits(outs[0], reduced(parts, op, factors))) << "reduce_scatter of a list " << what;
}

class ShmCollectives : public ::testing::TestWithParam<int> {};

TEST_P(ShmCollectives, MoveEveryDtype) {
  ASSERT_TRUE(shm_ranks(GetParam(), [](int rank) {
    for (const auto dtype : {torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong, torch::kBool,
                             torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble, torch::kComplexFloat,
                             torch::kComplexDouble, torch::kFloat8_e4m3fn, torch::kFloat8_e5m2}) {
      for (const int64_t numel : {int64_t{1}, int64_t{30001}}) {
        check_moves(fsdp2::default_group(), rank, dtype, numel);
      }
    }
    check_moves(fsdp2::default_group(), rank, torch::kFloat, 1300001);  // past the caches
  }));
}

TEST_P(ShmCollectives, ReduceInTheOrderOfTheRanks) {
  ASSERT_TRUE(shm_ranks(GetParam(), [](int rank) {
    const ProcessGroup group = fsdp2::default_group();
    for (const int64_t numel : kSizes) {
      for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble}) {
        for (const auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PREMUL_SUM}) {
          check_reductions(group, rank, dtype, op, numel);
        }
      }
    }
    check_reductions(group, rank, torch::kFloat, ReduceOp::SUM, 1300001);  // past the caches
    check_reductions(group, rank, torch::kBFloat16, ReduceOp::SUM, 2600001);
    for (const int64_t numel : {int64_t{5}, int64_t{30001}}) {
      for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble, torch::kLong, torch::kInt,
                               torch::kShort, torch::kChar, torch::kByte, torch::kBool}) {
        for (const auto op : {ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX}) {
          check_reductions(group, rank, dtype, op, numel);
        }
        if (!c10::isIntegralType(dtype, true)) continue;
        for (const auto op : {ReduceOp::SUM, ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR}) {
          check_reductions(group, rank, dtype, op, numel);
        }
      }
      for (const auto dtype : {torch::kComplexFloat, torch::kComplexDouble}) {
        for (const auto op : {ReduceOp::SUM, ReduceOp::AVG}) check_reductions(group, rank, dtype, op, numel);
      }
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShmCollectives, ::testing::Values(1, 2, 3, 4));

TEST(ShmCollectivesOf, NotANumberSurvivesEveryReduction) {
  ASSERT_TRUE(shm_ranks(3, [](int rank) {
    for (const auto op : {ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX, ReduceOp::AVG}) {
      for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
        Tensors tensors{torch::full({3}, 1.0 + rank, dtype)};
        if (rank == 1) tensors[0][1] = std::nan("");
        c10d::AllreduceOptions options;
        options.reduceOp = op;
        fsdp2::default_group()->allreduce(tensors, options)->wait();
        EXPECT_TRUE(tensors[0].isnan().equal(torch::tensor({false, true, false}))) << tensors[0];
      }
    }
  }));
}

TEST(ShmCollectivesOf, CoalescedTensors) {
  ASSERT_TRUE(shm_ranks(3, [](int rank) {
    const ProcessGroup group = fsdp2::default_group();
    const auto value = [&](int of, int64_t numel) {
      return data_of(of, torch::kFloat, numel, static_cast<int>(numel));
    };
    const std::vector<int64_t> numels = {3, 100000, 1, 0, 50};
    Tensors ins, outs, expected, sums;
    for (const int64_t numel : numels) {
      Tensors all;
      for (int of = 0; of < 3; ++of) all.push_back(value(of, numel));
      ins.push_back(all[static_cast<size_t>(rank)]);
      outs.push_back(torch::zeros({3 * numel}));
      expected.push_back(at::cat(all));
      sums.push_back(reduced(all, ReduceOp::SUM));
    }
    cpu(group)->allgather_into_tensor_coalesced(outs, ins)->wait();
    for (size_t i = 0; i < numels.size(); ++i) EXPECT_TRUE(same_bits(outs[i], expected[i])) << i;

    Tensors tensors;
    for (const Tensor& in : ins) tensors.push_back(in.clone());
    group->allreduce_coalesced(tensors)->wait();
    for (size_t i = 0; i < numels.size(); ++i) EXPECT_TRUE(same_bits(tensors[i], sums[i])) << i;

    // Every rank has the same: the sum of its slice is three times it.
    Tensors slices;
    for (const int64_t numel : numels) slices.push_back(torch::zeros({numel}));
    cpu(group)->reduce_scatter_tensor_coalesced(slices, expected)->wait();
    for (size_t i = 0; i < numels.size(); ++i) {
      const Tensor slice = expected[i].narrow(0, rank * numels[i], numels[i]);
      EXPECT_TRUE(same_bits(slices[i], slice + slice + slice)) << i;
    }

    // Different dtypes in one call.
    Tensors mixed{torch::full({4}, rank + 1.0), torch::full({5}, rank + 1, torch::kLong)};
    group->allreduce_coalesced(mixed)->wait();
    EXPECT_EQ(mixed[0][3].item<double>(), 6);
    EXPECT_EQ(mixed[1][4].item<int64_t>(), 6);
    Tensors mixed_outs{torch::zeros({12}), torch::zeros({15}, torch::kLong)};
    cpu(group)->allgather_into_tensor_coalesced(mixed_outs, mixed)->wait();
    EXPECT_EQ(mixed_outs[1].sum().item<int64_t>(), 90);

    std::vector<Tensors> lists(3);
    for (Tensors& list : lists) list = {torch::zeros({1}), torch::zeros({2})};
    Tensors own{torch::full({1}, rank + 0.0), torch::full({2}, rank + 10.0)};
    group->allgather_coalesced(lists, own)->wait();
    for (int of = 0; of < 3; ++of) {
      EXPECT_EQ(lists[static_cast<size_t>(of)][0].item<double>(), of);
      EXPECT_EQ(lists[static_cast<size_t>(of)][1][1].item<double>(), of + 10);
    }
  }));
}

TEST(ShmCollectivesOf, RowsOfDifferentNumbers) {
  ASSERT_TRUE(shm_ranks(3, [](int rank) {
    // Rank r sends r + j rows to rank j; a row says who sends it to whom.
    std::vector<int64_t> sends, receives;
    Tensors rows, expected;
    for (int other = 0; other < 3; ++other) {
      sends.push_back(rank + other);
      receives.push_back(rank + other);
      rows.push_back(torch::full({rank + other, 2}, 10.0 * rank + other));
      expected.push_back(torch::full({rank + other, 2}, 10.0 * other + rank));
    }
    Tensor in = at::cat(rows), out = torch::zeros({std::accumulate(receives.begin(), receives.end(), int64_t{0}), 2});
    cpu(fsdp2::default_group())->alltoall_base(out, in, receives, sends)->wait();
    EXPECT_TRUE(torch::equal(out, at::cat(expected))) << out;
    std::vector<int64_t> none;
    in = torch::arange(6) + 10 * rank;
    out = torch::zeros({6}, torch::kLong);
    cpu(fsdp2::default_group())->alltoall_base(out, in, none, none)->wait();
    EXPECT_EQ(out[2].item<int64_t>(), 10 + 2 * rank);
  }));
}

TEST(ShmCollectivesOf, SubGroupsAndMeshes) {
  ASSERT_TRUE(shm_ranks(4, [](int rank) {
    const auto mesh = fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"a", "b"});
    const ProcessGroup rows = mesh.get_group("b"), columns = mesh.get_group("a");
    EXPECT_EQ(rows->getBackend(c10::DeviceType::CPU)->getBackendName(), "shm");
    for (int round = 0; round < 20; ++round) {
      Tensor x = torch::full({1000}, rank + 1.0);
      fsdp2::all_reduce(x, ReduceOp::SUM, rows);
      EXPECT_EQ(x[999].item<double>(), rank < 2 ? 3 : 7);
      fsdp2::all_reduce(x, ReduceOp::SUM, columns);
      EXPECT_EQ(x[0].item<double>(), 10);
    }
    const ProcessGroup odd = fsdp2::new_group({3, 0, 1});
    if (rank == 2) return;
    Tensor all = torch::zeros({3}), mine = torch::full({1}, rank + 0.0);
    fsdp2::all_gather_into_tensor(all, mine, odd);
    EXPECT_TRUE(torch::equal(all, torch::tensor({3.f, 0.f, 1.f})));
  }));
}

}  // namespace
