// labels: ranks
// alone: it replaces connect()
// Sharing memory between ranks while signals come, and where a rank fails and another one is late.

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "backend/shm/share_file.h"
#include "backend/shm/shm_backend.h"
#include "backend/shm_ranks.h"
#include "support/tensors.h"

namespace {
std::atomic<bool> connects_late{false};
}  // namespace

extern "C" __attribute__((visibility("default"))) int connect(int fd, const sockaddr* address, socklen_t bytes) {
  if (connects_late && address->sa_family == AF_UNIX) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  return static_cast<int>(::syscall(SYS_connect, fd, address, bytes));
}

namespace {

using fsdp2::detail::shm::ask_for_file;
using fsdp2::detail::shm::File;
using fsdp2::detail::shm::FileServer;
using fsdp2::detail::shm::make_memory_file;
using fsdp2::detail::shm::shm_backend_of;
using fsdp2::testing::run_ranks;
using fsdp2::testing::shm_ranks;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

/// A signal with a handler every 2 ms, as sampling profilers send them.
class Alarms {
 public:
  Alarms() {
    struct sigaction action {};
    action.sa_handler = [](int) {};
    action.sa_flags = SA_RESTART;
    ::sigaction(SIGALRM, &action, nullptr);
    every(2000);
  }
  ~Alarms() { every(0); }

 private:
  static void every(int microseconds) {
    const itimerval interval{{0, microseconds}, {0, microseconds}};
    ::setitimer(ITIMER_REAL, &interval, nullptr);
  }
};

TEST(ShmSetup, SignalsDoNotEndAWaitForMemory) {
  ASSERT_TRUE(run_ranks(1, [](int) {
    const std::string name = c10::str("fsdp2/test-", ::getpid());
    FileServer server(name);
    const File file = make_memory_file(4096, 4096, "the test");
    sigset_t alarm;
    ::sigemptyset(&alarm);
    ::sigaddset(&alarm, SIGALRM);
    std::thread late([&] {
      ::pthread_sigmask(SIG_BLOCK, &alarm, nullptr);
      std::this_thread::sleep_for(milliseconds(200));
      EXPECT_TRUE(server.serve(file, seconds(10)));
    });
    const Alarms alarms;
    EXPECT_TRUE(ask_for_file(name, seconds(10)).is_open());
    late.join();
    const auto begin = Clock::now();
    EXPECT_FALSE(server.serve(file, milliseconds(100)));
    EXPECT_GE(Clock::now() - begin, milliseconds(100));
  }));
}

TEST(ShmSetup, GroupsAreMadeWhileSignalsCome) {
  ASSERT_TRUE(shm_ranks(
      2,
      [](int) {
        const Alarms alarms;
        for (int i = 0; i < 20; ++i) {
          torch::Tensor x = torch::ones({3});
          fsdp2::all_reduce(x, fsdp2::ReduceOp::SUM, fsdp2::new_group({0, 1}));
          EXPECT_EQ(x[2].item<double>(), 2);
        }
      },
      seconds(30)));
}

TEST(ShmSetup, ALateRankLearnsAtOnceThatAnotherOneFailed) {
  // Whichever of the two fails: its error is the one that all ranks show.
  for (const int poor : {1, 2}) {
    ASSERT_TRUE(shm_ranks(
        3,
        [&](int rank) {
          auto* const shm = shm_backend_of(fsdp2::default_group());
          std::vector<File> all;
          if (rank == poor) {
            const rlimit few{64, 64};
            ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
            for (int fd = 0; (fd = ::open("/dev/null", O_RDONLY)) >= 0;) all.emplace_back(fd);
          }
          connects_late = rank != poor;
          const auto begin = Clock::now();
          EXPECT_FSDP2_ERROR(shm->make_memory(4096, "weights"), kIo, "ulimit -n");
          EXPECT_LT(Clock::now() - begin, seconds(10));
          connects_late = false;
          all.clear();
          EXPECT_EQ(shm->make_memory(4096, "weights")->bytes(), 4096u);  // the group works on
        },
        seconds(30)));
  }
}

}  // namespace
