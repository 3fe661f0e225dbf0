// labels: ranks
// What the ranks of a host share: memory, signals, sums in rank order; and what happens when one of them is gone.

#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "backend/shm/shm_backend.h"
#include "backend/shm/sum.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using fsdp2::detail::shm::shm_backend_of;
using fsdp2::detail::shm::ShmBackend;
using fsdp2::detail::shm::sum_in_order;
using fsdp2::testing::run_ranks;
using fsdp2::testing::TempDir;
using std::chrono::milliseconds;
using torch::Tensor;

/// Runs `body` on ranks that are connected by shm alone.
void with_shm(int num_ranks, const std::function<void(int)>& body, milliseconds timeout = std::chrono::seconds(30)) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(num_ranks,
                        [&](int rank) {
                          fsdp2::init_process_group({.backend = "shm",
                                                     .init_method = "file://" + folder.path() + "/store",
                                                     .timeout = timeout,
                                                     .rank = rank,
                                                     .world_size = num_ranks});
                          body(rank);
                          fsdp2::destroy_process_group();
                        },
                        {.init_process_group = false}));
}

TEST(ShmMemory, IsSeenByEveryRank) {
  with_shm(3, [](int rank) {
    ShmBackend* const shm = shm_backend_of(fsdp2::default_group());
    ASSERT_NE(shm, nullptr);
    const auto memory = shm->make_memory(10000, "the test");
    const auto signals = shm->make_signals();
    EXPECT_EQ(memory->bytes(), 10000u);
    EXPECT_EQ(memory->data()[9999], std::byte{0});
    memory->data()[rank] = static_cast<std::byte>(rank + 1);
    EXPECT_FALSE(signals->reached(1));
    signals->post(1);
    signals->wait(1, "the first value");
    EXPECT_TRUE(signals->reached(1));
    for (int other = 0; other < 3; ++other) EXPECT_EQ(memory->data()[other], static_cast<std::byte>(other + 1));
    fsdp2::barrier();
  });
}

TEST(ShmMemory, TooMuchIsAnErrorOnEveryRank) {
  with_shm(2, [](int) {
    ShmBackend* const shm = shm_backend_of(fsdp2::default_group());
    EXPECT_FSDP2_ERROR(shm->make_memory(size_t{1} << 50, "weights"), kIo, "weights needs 1125899906842624 bytes");
    EXPECT_EQ(shm->make_memory(1, "a byte")->bytes(), 1u);  // the group works on
  });
}

TEST(ShmMemory, DifferentSizesAreNamed) {
  with_shm(2, [](int rank) {
    ShmBackend* const shm = shm_backend_of(fsdp2::default_group());
    EXPECT_FSDP2_ERROR(shm->make_memory(rank == 0 ? 100 : 200, "weights"), kInvalidArgument,
                       "rank 1 asks for 200 bytes but rank 0 for 100");
  });
}

TEST(ShmMemory, OtherBackendsHaveNone) {
  ASSERT_TRUE(run_ranks(1, [](int) {
    EXPECT_EQ(shm_backend_of(fsdp2::default_group()), nullptr);
    EXPECT_EQ(shm_backend_of({}), nullptr);
  }));
}

TEST(ShmSignals, ALateRankIsNamed) {
  with_shm(
      3,
      [](int rank) {
        const auto signals = shm_backend_of(fsdp2::default_group())->make_signals();
        if (rank != 1) {
          signals->post(5);
          EXPECT_FSDP2_ERROR(signals->wait(5, "gather of layer 7"), kTimeout,
                             "gather of layer 7 timed out after 400 ms: rank 1 did not come");
          // The next ones do not take their time too.
          const auto begin = std::chrono::steady_clock::now();
          EXPECT_FSDP2_ERROR(signals->wait(6, "gather of layer 8"), kPeerFailed, "cannot be used any more");
          EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(200));
          signals->wait(0, "what all have reached");
        } else {
          std::this_thread::sleep_for(milliseconds(1500));
        }
      },
      milliseconds(400));
}

TEST(ShmSignals, ADeadRankIsNoticedAtOnce) {
  const TempDir folder;
  ASSERT_FALSE(run_ranks(3,
                         [&](int rank) {
                           fsdp2::init_process_group({.backend = "shm",
                                                      .init_method = "file://" + folder.path() + "/store",
                                                      .timeout = std::chrono::seconds(60),
                                                      .rank = rank,
                                                      .world_size = 3});
                           const auto signals = shm_backend_of(fsdp2::default_group())->make_signals();
                           if (rank == 2) std::raise(SIGKILL);
                           const auto begin = std::chrono::steady_clock::now();
                           EXPECT_FSDP2_ERROR((signals->post(1), signals->wait(1, "a step")), kPeerFailed, "a step: ");
                           EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
                           std::ofstream(folder.path() + "/seen" + std::to_string(rank))
                               << ::testing::Test::HasFailure();
                         },
                         {.init_process_group = false}));
  EXPECT_EQ(fsdp2::testing::read_file(folder.path() + "/seen0"), "0");
  EXPECT_EQ(fsdp2::testing::read_file(folder.path() + "/seen1"), "0");
}

/// The sum as the definition says, one value at a time.
template <class Acc>
Tensor expected_sum(const std::vector<Tensor>& in, at::ScalarType out, double divisor) {
  const auto wide = c10::CppTypeToScalarType<Acc>::value;
  Tensor total = in[0].to(wide).clone();
  for (size_t k = 1; k < in.size(); ++k) {
    const Tensor next = in[k].to(wide);
    for (int64_t i = 0; i < total.numel(); ++i) {
      total.data_ptr<Acc>()[i] = total.data_ptr<Acc>()[i] + next.data_ptr<Acc>()[i];
    }
  }
  for (int64_t i = 0; i < total.numel(); ++i) total.data_ptr<Acc>()[i] /= static_cast<Acc>(divisor);
  return total.to(out);
}

TEST(SumInOrder, AgreesWithTheDefinition) {
  torch::manual_seed(7);
  const auto floating = {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf};
  for (const auto in_dtype : floating) {
    for (const auto out_dtype : floating) {
      for (const size_t count : {1, 2, 3, 5}) {
        for (const double divisor : {1.0, 2.0, 3.0}) {
          const int64_t numel = 4099;
          std::vector<Tensor> in;
          std::vector<const void*> pointers;
          for (size_t k = 0; k < count; ++k) {
            in.push_back((torch::randn({numel}) * 10).to(in_dtype));
            pointers.push_back(in.back().data_ptr());
          }
          Tensor out = torch::empty({numel}, out_dtype);
          sum_in_order(out.data_ptr(), out_dtype, pointers, in_dtype, numel, divisor);
          Tensor expected = in_dtype == torch::kDouble ? expected_sum<double>(in, out_dtype, divisor)
                                                       : expected_sum<float>(in, out_dtype, divisor);
          EXPECT_TRUE(torch::equal(out, expected)) << in_dtype << " " << out_dtype << " " << count << " " << divisor;
        }
      }
    }
  }
}

TEST(SumInOrder, KeepsSpecialValuesAndMayWriteOverAnInput) {
  torch::manual_seed(8);
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
    const auto wide = dtype == torch::kDouble ? torch::kDouble : torch::kFloat;
    for (const size_t written : {0, 1}) {
      for (const int divisor : {1, 2, 3}) {
        Tensor a = torch::cat({torch::tensor({1e30, -1e30, std::nan(""), 3.0, 1e-8}), torch::randn({4099})}).to(dtype),
               b = torch::cat({torch::tensor({1.0, 1.0, 1.0, std::nan(""), 0.0}), torch::randn({4099})}).to(dtype);
        const Tensor expected = ((a.to(wide) + b.to(wide)) / divisor).to(dtype);
        const std::vector<const void*> in{a.data_ptr(), b.data_ptr()};
        const Tensor& out = written == 0 ? a : b;
        sum_in_order(out.data_ptr(), dtype, in, dtype, out.numel(), divisor);
        EXPECT_TRUE(torch::allclose(out, expected, 0, 0, /*equal_nan=*/true)) << dtype << written << divisor;
      }
    }
  }
  Tensor whole = torch::ones({3}, torch::kInt);
  EXPECT_FSDP2_ERROR(sum_in_order(whole.data_ptr(), torch::kInt, {whole.data_ptr()}, torch::kInt, 3, 1), kUnsupported,
                     "Int");
}

}  // namespace
