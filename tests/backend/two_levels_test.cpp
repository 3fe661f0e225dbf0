// labels: ranks
// Groups over several hosts (FSDP2_HOST_ID plays them): shared memory inside of each, Gloo between them.

#include <chrono>
#include <csignal>
#include <thread>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using c10d::ReduceOp;
using fsdp2::ProcessGroup;
using torch::Tensor;

/// One letter a rank: its host.
::testing::AssertionResult ranks_on(const std::string& hosts, const std::function<void(int rank)>& body,
                                    std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  const TempDir folder;
  return run_ranks(static_cast<int>(hosts.size()),
                   [&](int rank) {
                     setenv("FSDP2_HOST_ID", hosts.substr(static_cast<size_t>(rank), 1).c_str(), 1);
                     fsdp2::init_process_group({.init_method = "file://" + folder.path() + "/store",
                                                .timeout = timeout,
                                                .rank = rank,
                                                .world_size = static_cast<int>(hosts.size())});
                     body(rank);
                     fsdp2::destroy_process_group();
                   },
                   {.init_process_group = false});
}

std::string backend_name(const ProcessGroup& group = fsdp2::default_group()) {
  return group->getBackend(c10::DeviceType::CPU)->getBackendName();
}

/// Small whole numbers, so that sums are exact in every dtype and order; different on every rank.
Tensor numbers(int64_t numel, int rank, at::ScalarType dtype) {
  return ((torch::arange(numel) * (rank + 3)).remainder(5) + 1).to(dtype);
}

void check_collectives(int rank, int size, int64_t numel, at::ScalarType dtype) {
  SCOPED_TRACE(c10::str(numel, " of ", dtype));
  std::vector<Tensor> of_rank;
  for (int each = 0; each < size; ++each) of_rank.push_back(numbers(numel * size, each, dtype));
  const Tensor all = torch::stack(of_rank).to(torch::kDouble);
  const int64_t begin = numel * rank;

  Tensor gathered = torch::zeros({size * numel * size}, dtype);
  fsdp2::all_gather_into_tensor(gathered, of_rank[static_cast<size_t>(rank)]);
  EXPECT_TRUE(gathered.equal(torch::cat(of_rank)));

  Tensor part = torch::zeros({numel}, dtype);
  fsdp2::reduce_scatter_tensor(part, of_rank[static_cast<size_t>(rank)]);
  EXPECT_TRUE(part.to(torch::kDouble).equal(all.sum(0).narrow(0, begin, numel)));
  fsdp2::reduce_scatter_tensor(part, of_rank[static_cast<size_t>(rank)], ReduceOp::MAX);
  EXPECT_TRUE(part.to(torch::kDouble).equal(all.amax(0).narrow(0, begin, numel)));

  const std::vector<std::pair<ReduceOp, Tensor>> reductions = {{ReduceOp::SUM, all.sum(0)},
                                                               {ReduceOp::MIN, all.amin(0)},
                                                               {ReduceOp::MAX, all.amax(0)},
                                                               {ReduceOp::PRODUCT, all.prod(0).remainder(1 << 30)}};
  for (const auto& [op, expected] : reductions) {
    if (op == ReduceOp::PRODUCT && dtype != torch::kLong) continue;
    Tensor tensor = of_rank[static_cast<size_t>(rank)].clone();
    fsdp2::all_reduce(tensor, op);
    EXPECT_TRUE(tensor.to(torch::kDouble).remainder(1 << 30).equal(expected));
  }
  for (int root = 0; root < size; ++root) {
    Tensor tensor = of_rank[static_cast<size_t>(rank)].clone();
    fsdp2::broadcast(tensor, root);
    EXPECT_TRUE(tensor.equal(of_rank[static_cast<size_t>(root)]));
  }
  fsdp2::barrier();
}

void check_all(int rank, int size) {
  EXPECT_EQ(backend_name(), "shm+gloo");
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kLong}) {
    for (const int64_t numel : {1, 7, 3001}) check_collectives(rank, size, numel, dtype);
  }
  Tensor mean = torch::full({5}, rank + 1.0);
  fsdp2::all_reduce(mean, ReduceOp::AVG);
  EXPECT_TRUE(mean.eq((size + 1) / 2.0).all().item<bool>());
}

TEST(TwoLevels, TwoHostsOfTwo) {
  ASSERT_TRUE(ranks_on("aabb", [](int rank) { check_all(rank, 4); }));
}

TEST(TwoLevels, HostsWhoseRanksAreMixed) {
  ASSERT_TRUE(ranks_on("abab", [](int rank) { check_all(rank, 4); }));
}

TEST(TwoLevels, ThreeHostsOfTwo) {
  ASSERT_TRUE(ranks_on("abccba", [](int rank) { check_all(rank, 6); }));
}

TEST(TwoLevels, OtherOperationsGoThroughOneGroup) {
  ASSERT_TRUE(ranks_on("aabb", [](int rank) {
    const ProcessGroup group = fsdp2::default_group();
    Tensor in = torch::full({4}, rank, torch::kLong) * 10 + torch::arange(4), out = torch::zeros({4}, torch::kLong);
    std::vector<int64_t> equal;
    group->getBackend(c10::DeviceType::CPU)->alltoall_base(out, in, equal, equal)->wait();
    EXPECT_TRUE(out.equal(torch::arange(4) * 10 + rank));
    std::vector<Tensor> tensors{torch::full({3}, static_cast<double>(rank))};
    if (rank == 0) group->send(tensors, 3, 7)->wait();
    if (rank == 3) group->recv(tensors, 0, 7)->wait();
    EXPECT_EQ(tensors[0][0].item<double>(), rank == 3 ? 0.0 : rank);
  }));
}

TEST(TwoLevels, WorksCompleteInAnyOrderOfWaiting) {
  ASSERT_TRUE(ranks_on("aabb", [](int rank) {
    std::vector<Tensor> x;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 6; ++i) {
      std::vector<Tensor> tensors{torch::full({i % 2 == 0 ? 3 : 20000}, rank + 1.0)};
      x.push_back(tensors[0]);
      works.push_back(fsdp2::default_group()->allreduce(tensors));
    }
    for (const size_t i : {4, 0, 3, 1, 5, 2}) works[i]->wait();
    for (const Tensor& tensor : x) EXPECT_TRUE(tensor.eq(10).all().item<bool>());

    std::vector<Tensor> tensors{torch::full({5}, rank + 1.0)};
    const auto future = fsdp2::default_group()->allreduce(tensors)->getFuture();
    future->wait();
    EXPECT_TRUE(future->value().toTensorVector()[0].eq(10).all().item<bool>());
  }));
}

TEST(TwoLevels, UnequalHostsUseGloo) {
  ASSERT_TRUE(ranks_on("aab", [](int rank) {
    EXPECT_EQ(backend_name(), "gloo");
    const ProcessGroup left = fsdp2::new_group({0, 1});
    if (rank < 2) {
      EXPECT_EQ(backend_name(left), "shm");
    }
  }));
}

TEST(TwoLevels, AModelTrainsAsOnOneHost) {
  const auto losses = [](const std::string& hosts) {
    const TempDir folder;
    const std::string path = folder.path() + "/losses";
    EXPECT_TRUE(ranks_on(hosts, [&](int rank) {
      torch::manual_seed(1);
      Net net(2);
      shard(net, {});
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      std::vector<Tensor> seen;
      for (int step = 0; step < 3; ++step) {
        torch::manual_seed(100 + step);
        const Tensor tokens = torch::randint(NetImpl::kVocab, {8, 4}).narrow(0, 2 * rank, 2);
        Tensor loss = net(tokens).pow(2).mean();
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        Tensor mean = loss.detach().clone();
        fsdp2::all_reduce(mean, ReduceOp::AVG);
        seen.push_back(mean);
      }
      if (rank == 0) torch::save(torch::stack(seen), path);
    }));
    Tensor result;
    torch::load(result, path);
    return result;
  };
  const Tensor one = losses("aaaa"), two = losses("aabb");
  EXPECT_TRUE(torch::allclose(one, two, 1e-6, 1e-7)) << one << two;
  EXPECT_FALSE(one[0].equal(one[2])) << one;
}

template <class Options>
Options options_with(std::chrono::milliseconds timeout) {
  Options options;
  options.timeout = timeout;
  return options;
}

/// An operation that some ranks are late for, with 500 ms of its own.
void expect_timeout_of_its_own(const std::function<void(fsdp2::ProcessGroup, std::chrono::milliseconds)>& operation) {
  // Late are: a rank of the same host, or the other host.
  for (const int first_late : {1, 2}) {
    EXPECT_TRUE(ranks_on("aabb", [&](int rank) {
      fsdp2::barrier();
      const bool is_late = first_late == 1 ? rank == 1 : rank >= 2;
      if (is_late) {
        std::this_thread::sleep_for(std::chrono::seconds(3));
        return;
      }
      const auto start = std::chrono::steady_clock::now();
      std::string said;
      try {
        operation(fsdp2::default_group(), std::chrono::milliseconds(500));
      } catch (const std::exception& error) {
        said = error.what();
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(2500)) << said;
      EXPECT_NE(said, "");
    })) << "late: "
        << first_late;
  }
}

TEST(TwoLevels, AnAllGatherMayHaveATimeoutOfItsOwn) {
  expect_timeout_of_its_own([](const ProcessGroup& group, std::chrono::milliseconds timeout) {
    Tensor in = torch::ones({10}), out = torch::ones({40});
    const auto options = options_with<c10d::AllgatherOptions>(timeout);
    group->getBackend(c10::DeviceType::CPU)->_allgather_base(out, in, options)->wait();
  });
}

TEST(TwoLevels, AReduceScatterMayHaveATimeoutOfItsOwn) {
  expect_timeout_of_its_own([](const ProcessGroup& group, std::chrono::milliseconds timeout) {
    Tensor in = torch::ones({40}), out = torch::ones({10});
    const auto options = options_with<c10d::ReduceScatterOptions>(timeout);
    group->getBackend(c10::DeviceType::CPU)->_reduce_scatter_base(out, in, options)->wait();
  });
}

TEST(TwoLevels, AnAllReduceMayHaveATimeoutOfItsOwn) {
  for (const int64_t numel : {10, 100000}) {
    expect_timeout_of_its_own([&](const ProcessGroup& group, std::chrono::milliseconds timeout) {
      std::vector<Tensor> tensors{torch::ones({numel})};
      group->allreduce(tensors, options_with<c10d::AllreduceOptions>(timeout))->wait();
    });
  }
}

TEST(TwoLevels, ARankThatDiesIsNoticed) {
  const auto result = ranks_on(
      "aabb",
      [](int rank) {
        fsdp2::barrier();
        if (rank == 1) ::raise(SIGKILL);
        Tensor tensor = torch::ones({10});
        try {
          for (int i = 0; i < 3; ++i) fsdp2::all_reduce(tensor);
          ADD_FAILURE() << "no error";
        } catch (const fsdp2::Error& error) {
          EXPECT_TRUE(error.code() == fsdp2::ErrorCode::kPeerFailed || error.code() == fsdp2::ErrorCode::kTimeout)
              << error.what();
          std::cerr << "said: " << error.what_without_backtrace() << std::endl;
        }
      },
      std::chrono::seconds(5));
  EXPECT_FALSE(result);
  EXPECT_NE(std::string(result.message()).find("said: "), std::string::npos) << result.message();
  EXPECT_EQ(std::string(result.message()).find("no error"), std::string::npos) << result.message();
}

}  // namespace
