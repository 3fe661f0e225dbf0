// labels: ranks
// The shm backend when things happen late, in another order, wrongly or not at all.

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "backend/shm_ranks.h"
#include "support/tensors.h"

namespace {

using c10d::ReduceOp;
using fsdp2::ProcessGroup;
using fsdp2::testing::run_ranks;
using fsdp2::testing::shm_ranks;
using fsdp2::testing::TempDir;
using std::chrono::milliseconds;
using std::chrono::seconds;
using torch::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

WorkPtr all_reduce(const ProcessGroup& group, const Tensor& tensor) {
  Tensors tensors{tensor};
  return group->allreduce(tensors);
}

template <class Condition>
bool comes_true(const Condition& condition) {
  for (int i = 0; i < 2000 && !condition(); ++i) std::this_thread::sleep_for(milliseconds(5));
  return condition();
}

TEST(ShmAsync, WorksCompleteInAnyOrderOfWaiting) {
  ASSERT_TRUE(shm_ranks(2, [](int rank) {
    const ProcessGroup a = fsdp2::default_group(), b = fsdp2::new_group({0, 1}), c = fsdp2::new_group({1, 0});
    for (int round = 0; round < 5; ++round) {
      Tensors x;
      std::vector<WorkPtr> works;
      for (const ProcessGroup& group : {a, b, c, a, b, c}) {
        x.push_back(torch::full({200000}, rank + 1.0));
        works.push_back(all_reduce(group, x.back()));
      }
      const std::vector<size_t> order =
          rank == 0 ? std::vector<size_t>{2, 5, 0, 4, 1, 3} : std::vector<size_t>{4, 0, 3, 1, 5, 2};
      for (const size_t i : order) works[i]->wait();
      for (const Tensor& tensor : x) EXPECT_TRUE(tensor.eq(3).all().item<bool>());
    }
  }));
}

TEST(ShmAsync, AWorkThatNobodyWaitsForCompletes) {
  const TempDir folder;
  ASSERT_TRUE(shm_ranks(2, [&](int rank) {
    Tensor x = torch::full({300000}, rank + 1.0);
    const WorkPtr work = all_reduce(fsdp2::default_group(), x);
    const std::string file = folder.path() + "/rank1_is_done";
    if (rank == 1) {
      work->wait();
      std::ofstream(file) << "done";
    } else {
      EXPECT_TRUE(comes_true([&] { return std::filesystem::exists(file); }));  // rank 1 got its sum
      EXPECT_TRUE(comes_true([&] { return work->isCompleted(); }));
    }
    EXPECT_TRUE(work->isSuccess());
    EXPECT_TRUE(x.eq(3).all().item<bool>());
    EXPECT_TRUE(work->result()[0].is_same(x));
  }));
}

TEST(ShmAsync, AFutureHoldsTheResult) {
  ASSERT_TRUE(shm_ranks(2, [](int rank) {
    Tensor x = torch::full({3}, rank + 1.0);
    const auto future = all_reduce(fsdp2::default_group(), x)->getFuture();
    future->wait();
    EXPECT_EQ(future->value().toTensorVector()[0][2].item<double>(), 3);
  }));
}

TEST(ShmAsync, FuturesAreTakenInAnyOrder) {
  ASSERT_TRUE(shm_ranks(2, [](int rank) {
    const ProcessGroup a = fsdp2::new_group({0, 1}), b = fsdp2::new_group({0, 1});
    Tensor x = torch::full({1000}, rank + 1.0), y = x.clone();
    Tensors in{torch::zeros({5})}, out{torch::full({5}, rank + 0.0)};
    auto receive = a->recv(in, 1 - rank, 0)->getFuture();  // before anything is sent
    auto first = (rank == 0 ? all_reduce(a, x) : all_reduce(b, y))->getFuture();
    auto second = (rank == 0 ? all_reduce(b, y) : all_reduce(a, x))->getFuture();
    std::atomic<bool> called{false};
    first->addCallback([&](auto& future) {  // may use the same group
      Tensor z = torch::ones({2});
      all_reduce(fsdp2::default_group(), z)->wait();
      called = !future.hasError() && z[0].template item<double>() == 2;
    });
    second->waitAndThrow();
    EXPECT_EQ(second->value().toTensorVector()[0][999].item<double>(), 3);
    EXPECT_TRUE(comes_true([&] { return called.load(); }));
    const WorkPtr send = a->send(out, 1 - rank, 0);
    send->getFuture()->waitAndThrow();
    receive->waitAndThrow();
    EXPECT_EQ(in[0][4].item<double>(), 1 - rank);
    EXPECT_TRUE(send->getFuture()->completed());  // asked again, after the end
  }));
}

TEST(ShmAsync, AFutureOfADestroyedGroupHoldsTheError) {
  ASSERT_TRUE(shm_ranks(2, [](int rank) {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      const ProcessGroup dropped = fsdp2::new_group({0, 1});
      Tensors in{torch::zeros({5})};
      if (rank == 0) future = dropped->recv(in, 1, 0)->getFuture();
    }
    if (rank == 0) {
      EXPECT_TRUE(comes_true([&] { return future->completed() && future->hasError(); }));
    }
    fsdp2::barrier();
  }));
}

TEST(ShmAsync, AWaitEndsInTimeAndTheOperationGoesOn) {
  ASSERT_TRUE(shm_ranks(2, [](int rank) {
    Tensor x = torch::full({10}, rank + 1.0);
    Tensors in{torch::zeros({5})}, out{torch::full({5}, 7.0)};
    if (rank == 1) std::this_thread::sleep_for(milliseconds(2000));
    const WorkPtr work = all_reduce(fsdp2::default_group(), x);
    const WorkPtr message =
        rank == 0 ? fsdp2::default_group()->recv(in, 1, 0) : fsdp2::default_group()->send(out, 0, 0);
    if (rank == 0) {
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_FSDP2_ERROR(work->wait(milliseconds(100)), kTimeout, "ended after 100 ms");
      EXPECT_FSDP2_ERROR(message->wait(milliseconds(100)), kTimeout, "ended after 100 ms");
      std::this_thread::sleep_for(milliseconds(200));  // long enough for the helper to come
      EXPECT_FSDP2_ERROR(work->wait(milliseconds(100)), kTimeout, "ended after 100 ms");
      EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(1500));
    }
    work->wait();
    message->wait();
    EXPECT_EQ(x[9].item<double>(), 3);
    if (rank == 0) {
      EXPECT_EQ(in[0][4].item<double>(), 7);
    }
    fsdp2::barrier();  // the group works on
  }));
}

TEST(ShmMessages, PassBothWaysInAnyOrder) {
  ASSERT_TRUE(shm_ranks(3, [](int rank) {
    const ProcessGroup group = fsdp2::default_group();
    const int next = (rank + 1) % 3, previous = (rank + 2) % 3;
    // More than a pipe holds, all sends before all receives, waited for in the wrong order.
    Tensors big{torch::full({500000}, rank + 0.0)}, small{torch::full({2}, rank + 10, torch::kLong)};
    Tensors big_in{torch::empty({500000})}, small_in{torch::empty({2}, torch::kLong)}, empty{torch::empty({0})};
    std::vector<WorkPtr> works{group->send(big, next, 1),          group->send(small, next, 2),
                               group->send(empty, next, 3),        group->recv(empty, previous, 3),
                               group->recv(small_in, previous, 2), group->recv(big_in, previous, 1)};
    for (size_t i = works.size(); i-- > 0;) works[i]->wait();
    EXPECT_TRUE(big_in[0].eq(previous).all().item<bool>());
    EXPECT_EQ(small_in[0][1].item<int64_t>(), previous + 10);
    // From whoever it is, and to oneself.
    if (rank == 0) {
      double sum = 0;
      for (int i = 0; i < 3; ++i) {
        Tensors from_any{torch::empty({1})}, own{torch::full({1}, 5.0)};
        if (i == 0) group->send(own, 0, 7)->wait();
        const WorkPtr work = group->recvAnysource(from_any, 7);
        work->wait();
        EXPECT_EQ(from_any[0].item<double>(), work->sourceRank() == 0 ? 5 : work->sourceRank());
        sum += from_any[0].item<double>();
      }
      EXPECT_EQ(sum, 8);
    } else {
      Tensors mine{torch::full({1}, rank + 0.0)};
      group->send(mine, 0, 7)->wait();
    }
    fsdp2::barrier();
    Tensors three{torch::zeros({3})}, four{torch::zeros({4})};
    if (rank == 1) group->send(three, 2, 0)->wait();
    if (rank == 2) {
      EXPECT_FSDP2_ERROR(group->recv(four, 1, 0)->wait(), kInvalidArgument,
                         "rank 1 sent 12 bytes Float with tag 0 but rank 2 receives 16 bytes Float");
    }
    // One that is sent and not waited for still arrives.
    if (rank == 1) {
      group->send(big, 2, 4);
      std::this_thread::sleep_for(milliseconds(300));
    }
    if (rank == 2) {
      group->recv(big_in, 1, 4)->wait();
      EXPECT_TRUE(big_in[0].eq(1).all().item<bool>());
    }
  }));
}

TEST(ShmErrors, DifferentCallsAreNamedOnEveryRank) {
  ASSERT_TRUE(shm_ranks(3, [](int rank) {
    const ProcessGroup group = fsdp2::default_group();
    Tensor x = torch::ones({rank == 1 ? 3 : 4});
    EXPECT_FSDP2_ERROR(fsdp2::all_reduce(x), kInvalidArgument,
                       "rank 0 calls all_reduce (SUM) of 16 bytes Float; rank 1 calls all_reduce (SUM) of 12 bytes");
    x = torch::ones({4}, rank == 2 ? torch::kInt : torch::kFloat);
    EXPECT_FSDP2_ERROR(all_reduce(group, x)->wait(), kInvalidArgument, "rank 2 calls all_reduce (SUM) of 16 bytes Int");
    x = torch::ones({4});
    EXPECT_FSDP2_ERROR(fsdp2::all_reduce(x, rank == 0 ? ReduceOp::MAX : ReduceOp::SUM), kInvalidArgument,
                       "rank 0 calls all_reduce (MAX)");
    EXPECT_FSDP2_ERROR(fsdp2::broadcast(x, rank == 0 ? 0 : 1), kInvalidArgument, "broadcast with root rank 1");
    EXPECT_FSDP2_ERROR((rank == 0 ? fsdp2::barrier() : fsdp2::all_reduce(x)), kInvalidArgument, "rank 0 calls barrier");
    std::vector<int64_t> none, splits{2, rank == 1 ? 1 : 2, rank == 1 ? 3 : 2};
    Tensor in = torch::zeros({6}), out = torch::zeros({6});
    const auto cpu = group->getBackend(c10::DeviceType::CPU);
    EXPECT_FSDP2_ERROR(cpu->alltoall_base(out, in, none, splits)->wait(), kInvalidArgument,
                       "rank 1 sends 4 bytes to rank 1, which expects 8");
    fsdp2::all_reduce(x);  // the group works on
    EXPECT_EQ(x[3].item<double>(), 3);
  }));
}

TEST(ShmErrors, TensorsThatCannotBeMovedAreNamed) {
  ASSERT_TRUE(shm_ranks(1, [](int) {
    const ProcessGroup group = fsdp2::default_group();
    EXPECT_FSDP2_ERROR(all_reduce(group, torch::ones({2, 3}).t()), kInvalidArgument, "call contiguous() first");
    EXPECT_FSDP2_ERROR(all_reduce(group, torch::ones({2}, torch::kFloat8_e5m2)), kUnsupported, "SUM of Float8_e5m2");
    Tensors tensors{torch::ones({2})};
    c10d::BroadcastOptions options;
    options.rootRank = 4;
    EXPECT_FSDP2_ERROR(group->broadcast(tensors, options), kInvalidArgument, "root 4");
    EXPECT_FSDP2_ERROR(group->send(tensors, 1, 0), kInvalidArgument, "rank 1");
    std::vector<Tensors> lists{{torch::ones({2}), torch::ones({2})}};
    EXPECT_FSDP2_ERROR(group->allgather(lists, tensors), kInvalidArgument, "one per rank");
  }));
}

TEST(ShmErrors, ALateRankIsNamed) {
  ASSERT_TRUE(shm_ranks(
      3,
      [](int rank) {
        Tensor x = torch::ones({4});
        fsdp2::all_reduce(x);
        if (rank == 2) std::this_thread::sleep_for(milliseconds(1500));
        if (rank != 2) {
          const auto begin = std::chrono::steady_clock::now();
          try {
            fsdp2::all_reduce(x);
            ADD_FAILURE() << "no error";
          } catch (const fsdp2::Error& error) {
            // Whoever sees it first tells the other.
            const std::string text = error.what();
            EXPECT_TRUE(error.code() == fsdp2::ErrorCode::kTimeout || error.code() == fsdp2::ErrorCode::kPeerFailed)
                << text;
            EXPECT_NE(
                text.find("all_reduce number 2 of its group (16 bytes) timed out after 500 ms: rank 2 did not come"),
                std::string::npos)
                << text;
          }
          EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(10));
          EXPECT_FSDP2_ERROR(fsdp2::all_reduce(x), kPeerFailed, "cannot be used any more");
        } else {
          EXPECT_FSDP2_ERROR((fsdp2::all_reduce(x), fsdp2::barrier()), kPeerFailed, "gave up earlier");
        }
      },
      milliseconds(500)));
}

TEST(ShmErrors, ATimeoutMayBeEndless) {
  for (const char* backend : {"shm", "gloo"}) {
    for (const milliseconds timeout : {milliseconds::max(), milliseconds(std::chrono::hours(24 * 365 * 300))}) {
      ASSERT_TRUE(shm_ranks(
          2,
          [&](int rank) {
            Tensor x = torch::ones({4});
            if (rank == 1) std::this_thread::sleep_for(milliseconds(200));
            const WorkPtr work = all_reduce(fsdp2::default_group(), x);
            if (rank == 0 && timeout == milliseconds::max()) std::this_thread::sleep_for(milliseconds(100));
            EXPECT_TRUE(std::string(backend) == "shm" ? work->wait(timeout) : work->wait());
            EXPECT_EQ(x[3].item<double>(), 2);
            Tensors message{torch::full({3}, 7.0)};
            if (rank == 1) std::this_thread::sleep_for(milliseconds(200));
            (rank == 0 ? fsdp2::default_group()->recv(message, 1, 0) : fsdp2::default_group()->send(message, 0, 0))
                ->wait();
          },
          timeout, backend));
    }
  }
}

TEST(ShmErrors, ARankThatIsKilledIsNoticedAtOnce) {
  const TempDir folder;
  ASSERT_FALSE(shm_ranks(3, [&](int rank) {
    Tensor x = torch::ones({2000000});
    fsdp2::all_reduce(x);
    const WorkPtr work = all_reduce(fsdp2::default_group(), x);
    if (rank == 2) {
      std::thread([] {
        std::this_thread::sleep_for(milliseconds(20));
        std::raise(SIGKILL);
      }).detach();
      for (;;) fsdp2::all_reduce(x);
    }
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_FSDP2_ERROR(for (work->wait();;) fsdp2::all_reduce(x), kPeerFailed, "all_reduce");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(10));
    std::ofstream(folder.path() + "/rank" + std::to_string(rank)) << ::testing::Test::HasFailure();
  }));
  EXPECT_EQ(fsdp2::testing::read_file(folder.path() + "/rank0"), "0");
  EXPECT_EQ(fsdp2::testing::read_file(folder.path() + "/rank1"), "0");
}

TEST(ShmErrors, ARankThatLeavesIsNamedButItsMessagesArrive) {
  ASSERT_TRUE(shm_ranks(2, [](int rank) {
    Tensors x{torch::full({1000}, rank + 1.0)};
    if (rank == 0) {
      fsdp2::default_group()->send(x, 1, 0)->wait();
      return;
    }
    std::this_thread::sleep_for(milliseconds(300));
    fsdp2::default_group()->recv(x, 0, 0)->wait();
    EXPECT_EQ(x[0][999].item<double>(), 1);
    EXPECT_FSDP2_ERROR(fsdp2::barrier(), kPeerFailed, "rank 0");
  }));
}

TEST(ShmTeardown, OutstandingWorksAndGroupsThatOutliveTheJob) {
  ASSERT_TRUE(shm_ranks(2, [](int rank) {
    Tensor x = torch::full({4}, rank + 1.0), y = x.clone();
    WorkPtr work;
    ProcessGroup kept = fsdp2::new_group({0, 1});
    {
      const ProcessGroup dropped = fsdp2::new_group({0, 1});
      if (rank == 0) work = all_reduce(dropped, x);
    }
    fsdp2::destroy_process_group();
    if (rank == 0) EXPECT_FSDP2_ERROR(work->wait(), kCancelled, "destroyed");
    all_reduce(kept, y)->wait();
    EXPECT_EQ(y[0].item<double>(), 3);
  }));
}

TEST(ShmTeardown, NothingIsLeft) {
  const auto count = [](const char* folder) {
    int entries = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++entries;
    return entries;
  };
  const TempDir folder;
  const int before = count("/dev/shm");
  ASSERT_TRUE(run_ranks(2,
                        [&](int rank) {
                          int files = 0;
                          for (int i = 0; i < 6; ++i) {
                            fsdp2::init_process_group({.backend = "shm",
                                                       .init_method = c10::str("file://", folder.path(), "/store", i),
                                                       .rank = rank,
                                                       .world_size = 2});
                            const ProcessGroup pair = fsdp2::new_group({1, 0});
                            Tensor x = torch::ones({100});
                            all_reduce(pair, x)->wait();
                            fsdp2::destroy_process_group();
                            if (i == 2) files = count("/proc/self/fd");
                          }
                          EXPECT_LE(count("/proc/self/fd"), files);
                        },
                        {.init_process_group = false}));
  EXPECT_EQ(count("/dev/shm"), before);
}

TEST(ShmTeardown, AForkedChildIsNoRank) {
  ASSERT_TRUE(shm_ranks(2, [](int) {
    const pid_t child = ::fork();
    if (child == 0) {
      fsdp2::destroy_process_group();
      ::_exit(0);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    Tensor x = torch::ones({10});
    fsdp2::barrier();
    std::this_thread::sleep_for(milliseconds(50));
    fsdp2::all_reduce(x);
    EXPECT_EQ(x[0].item<double>(), 2);
  }));
}

TEST(ShmCrowded, EightRanksOnFewProcessors) {
  ASSERT_TRUE(shm_ranks(8, [](int rank) {
    for (int round = 0; round < 100; ++round) {
      Tensor x = torch::full({round % 10 == 0 ? 100000 : 10}, rank + 1.0);
      fsdp2::all_reduce(x);
      ASSERT_EQ(x[9].item<double>(), 36);
    }
  }));
}

std::string backend_name() { return fsdp2::default_group()->getBackend(c10::DeviceType::CPU)->getBackendName(); }

TEST(ShmChoice, IsTheDefaultOnOneHost) {
  ASSERT_TRUE(shm_ranks(
      2, [](int) { EXPECT_EQ(backend_name(), "shm"); }, seconds(30), ""));
  ASSERT_TRUE(shm_ranks(
      2, [](int) { EXPECT_EQ(backend_name(), "shm"); }, seconds(30), "cpu:shm"));
  ASSERT_TRUE(shm_ranks(
      2, [](int) { EXPECT_EQ(backend_name(), "gloo"); }, seconds(30), "cpu:gloo"));
}

TEST(ShmChoice, RanksOnDifferentHostsAreNamed) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(
      4,
      [&](int rank) {
        setenv("FSDP2_HOST_ID", rank < 2 ? "left" : "right", 1);
        const auto options = [&](const char* backend, const char* store) {
          return fsdp2::ProcessGroupOptions{.backend = backend,
                                            .init_method = "file://" + folder.path() + store,
                                            .timeout = seconds(30),
                                            .rank = rank,
                                            .world_size = 4};
        };
        EXPECT_FSDP2_ERROR(fsdp2::init_process_group(options("shm", "/a")), kInvalidArgument, "ranks 2, 3 on right");
        fsdp2::init_process_group(options("", "/b"));
        EXPECT_EQ(backend_name(), "shm+gloo");
        const auto mesh = fsdp2::init_device_mesh(torch::kCPU, {2, 2});
        EXPECT_EQ(mesh.get_group(0)->getBackend(c10::DeviceType::CPU)->getBackendName(), "gloo");
        EXPECT_EQ(mesh.get_group(1)->getBackend(c10::DeviceType::CPU)->getBackendName(), "shm");  // of one host
        fsdp2::destroy_process_group();
      },
      {.init_process_group = false}));
}

TEST(ShmChoice, WhereTheSystemRefusesTheDefaultIsGloo) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2,
                        [&](int rank) {
                          int warnings = 0;
                          fsdp2::set_log_sink([&](fsdp2::LogLevel, const std::string& text) {
                            warnings += text.find("ulimit -f") != std::string::npos;
                          });
                          if (rank == 0) {
                            const rlimit limit{1 << 20, 1 << 20};
                            ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
                          }
                          const auto options = [&](const char* backend, const char* store) {
                            return fsdp2::ProcessGroupOptions{.backend = backend,
                                                              .init_method = "file://" + folder.path() + store,
                                                              .timeout = seconds(30),
                                                              .rank = rank,
                                                              .world_size = 2};
                          };
                          EXPECT_FSDP2_ERROR(fsdp2::init_process_group(options("shm", "/a")), kIo, "ulimit -f");
                          EXPECT_EQ(warnings, 0);
                          fsdp2::init_process_group(options("", "/b"));
                          EXPECT_EQ(backend_name(), "gloo");
                          EXPECT_EQ(warnings, 1);
                          fsdp2::destroy_process_group();
                          fsdp2::set_log_sink({});
                        },
                        {.init_process_group = false}));
}

}  // namespace
