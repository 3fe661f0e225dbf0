// labels: ranks
// The rendezvous says what is missing; collectives check what they get.

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using fsdp2::testing::run_ranks;
using fsdp2::testing::TempDir;
using std::chrono::milliseconds;
using torch::Tensor;

fsdp2::ProcessGroupOptions options(const std::string& method, int rank, int size, milliseconds timeout) {
  return {.backend = "gloo", .init_method = method, .timeout = timeout, .rank = rank, .world_size = size};
}

std::string free_tcp_address() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(socket, generic, length), 0);
  EXPECT_EQ(::getsockname(socket, generic, &length), 0);
  ::close(socket);
  return "tcp://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
}

void clear_environment() {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK",
                           "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS",
                           "TORCHELASTIC_USE_AGENT_STORE"}) {
    unsetenv(name);
  }
}

TEST(Rendezvous, MissingEnvironmentIsNamed) {
  ASSERT_TRUE(run_ranks(1, [](int) {
    clear_environment();
    EXPECT_FSDP2_ERROR(fsdp2::init_process_group(), kInvalidArgument, "RANK and WORLD_SIZE not set");
    setenv("WORLD_SIZE", "2", 1);
    EXPECT_FSDP2_ERROR(fsdp2::init_process_group(), kInvalidArgument, "RANK not set");
    setenv("RANK", "0", 1);
    EXPECT_FSDP2_ERROR(fsdp2::init_process_group(), kInvalidArgument, "MASTER_ADDR and MASTER_PORT");
    setenv("RANK", "two", 1);
    EXPECT_FSDP2_ERROR(fsdp2::init_process_group(), kInvalidArgument, "RANK is \"two\"");
    setenv("RANK", "2", 1);
    EXPECT_FSDP2_ERROR(fsdp2::init_process_group(), kInvalidArgument, "rank 2 of world size 2");
    EXPECT_FSDP2_ERROR(fsdp2::get_rank(), kUsage, "init_process_group()");
  }, {.init_process_group = false}));
}

TEST(Rendezvous, MpiAndSlurmEnvironmentsAreRead) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    clear_environment();
    setenv(rank == 0 ? "OMPI_COMM_WORLD_RANK" : "SLURM_PROCID", std::to_string(rank).c_str(), 1);
    setenv(rank == 0 ? "OMPI_COMM_WORLD_SIZE" : "SLURM_NTASKS", "2", 1);
    fsdp2::init_process_group({.backend = "gloo", .init_method = "file://" + folder.path() + "/store"});
    EXPECT_EQ(fsdp2::get_rank(), rank);
    EXPECT_EQ(fsdp2::get_world_size(), 2);
    fsdp2::destroy_process_group();
  }, {.init_process_group = false}));
}

TEST(Rendezvous, ARankThatNeverComesIsNamedWithinTheTimeout) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_FSDP2_ERROR(
        fsdp2::init_process_group(options("file://" + folder.path() + "/store", rank, 4, milliseconds(700))), kTimeout,
        "2 of 4 ranks never came: 2, 3");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  }, {.init_process_group = false}));
}

TEST(Rendezvous, AnUnreachableMasterIsNamed) {
  ASSERT_TRUE(run_ranks(1, [](int) {
    EXPECT_FSDP2_ERROR(fsdp2::init_process_group(options("tcp://127.0.0.1:1", 1, 2, milliseconds(700))), kPeerFailed,
                       "cannot reach the master at 127.0.0.1:1");
  }, {.init_process_group = false}));
}

TEST(Rendezvous, DifferentWorldSizesAreNamedOnEveryRank) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    EXPECT_FSDP2_ERROR(
        fsdp2::init_process_group(options("file://" + folder.path() + "/store", rank, rank + 2, milliseconds(5000))),
        kInvalidArgument, "WORLD_SIZE must be equal on all ranks");
  }, {.init_process_group = false}));
}

TEST(Rendezvous, DifferentSettingsAreNamedOnEveryRank) {
  const TempDir folder;
  // Rank 0 serves the tcp:// store, and is the one that differs.
  for (const auto* variable : {"FSDP2_DEBUG", "FSDP2_SHM_IN_PLACE"}) {
    for (const std::string& method : {"file://" + folder.path() + "/" + variable, free_tcp_address()}) {
      ASSERT_TRUE(run_ranks(3, [&](int rank) {
        if (rank == 0) ::setenv(variable, "0", 1);
        if (rank == 1) std::this_thread::sleep_for(milliseconds(300));
        EXPECT_FSDP2_ERROR(fsdp2::init_process_group(options(method, rank, 3, milliseconds(5000))), kInvalidArgument,
                           "these variables must be equal on all ranks");
      }, {.init_process_group = false}));
    }
  }
}

TEST(Rendezvous, TwoProcessesWithOneRankAreNamed) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2,
                        [&](int) {
                          EXPECT_FSDP2_ERROR(fsdp2::init_process_group(options("file://" + folder.path() + "/store", 1,
                                                                               3, milliseconds(5000))),
                                             kInvalidArgument, "two processes claim rank 1");
                        },
                        {.init_process_group = false}));
}

TEST(Rendezvous, WrongOptionsAreNamed) {
  ASSERT_TRUE(run_ranks(1, [](int) {
    auto wrong = options("udp://x:1", 0, 1, milliseconds(500));
    EXPECT_FSDP2_ERROR(fsdp2::init_process_group(wrong), kInvalidArgument, "udp://x:1");
    wrong.backend = "smoke";
    EXPECT_FSDP2_ERROR(fsdp2::init_process_group(wrong), kInvalidArgument, "smoke");
  }, {.init_process_group = false}));
}

RANKS_TEST(ProcessGroup, LeavesAndJoinsAgain, 2) {
  EXPECT_FSDP2_ERROR(fsdp2::init_process_group(), kUsage, "called twice");
  fsdp2::DeviceMesh mesh = fsdp2::init_device_mesh(torch::kCPU, {2});
  fsdp2::destroy_process_group();
  fsdp2::destroy_process_group();
  EXPECT_FALSE(fsdp2::is_initialized());
  EXPECT_EQ(mesh.size(), 2);  // still usable, and destroyed after the group
}

RANKS_TEST(ProcessGroup, CollectivesGiveTheirValues, 3) {
  Tensor x = torch::full({2, 3}, rank + 1.0);
  fsdp2::all_reduce(x);
  EXPECT_EQ(x[1][2].item<double>(), 6);
  x = torch::full({3, 2}, rank + 1.0).t();  // not contiguous
  fsdp2::all_reduce(x, fsdp2::ReduceOp::AVG);
  EXPECT_EQ(x[1][2].item<double>(), 2);
  x = torch::full({4}, rank, torch::kBool);
  fsdp2::broadcast(x, 1);
  EXPECT_TRUE(x.all().item<bool>());
  Tensor all = torch::empty({6}), mine = torch::full({2}, rank + 0.0);
  fsdp2::all_gather_into_tensor(all, mine);
  EXPECT_TRUE(torch::equal(all, torch::tensor({0.f, 0.f, 1.f, 1.f, 2.f, 2.f})));
  Tensor part = torch::empty({2});
  fsdp2::reduce_scatter_tensor(part, all);
  EXPECT_EQ(part[0].item<double>(), 3 * rank);
  fsdp2::reduce_scatter_tensor(part, all, fsdp2::ReduceOp::AVG);
  EXPECT_EQ(part[0].item<double>(), rank);
  const auto texts = fsdp2::all_gather_strings(std::string(static_cast<size_t>(rank) * 1000, 'x'));
  EXPECT_EQ(texts[0].size() + texts[1].size() + texts[2].size(), 3000u);
  fsdp2::barrier();
}

RANKS_TEST(ProcessGroup, WrongTensorsAreNamed, 2) {
  Tensor out = torch::empty({3}), in = torch::empty({2});
  EXPECT_FSDP2_ERROR(fsdp2::all_gather_into_tensor(out, in), kInvalidArgument, "expected 4 elements");
  Tensor nothing;
  EXPECT_FSDP2_ERROR(fsdp2::all_reduce(nothing), kInvalidArgument, "all_reduce");
  Tensor whole_numbers = torch::ones({2}, torch::kLong);
  EXPECT_FSDP2_ERROR(fsdp2::all_reduce(whole_numbers, fsdp2::ReduceOp::AVG), kInvalidArgument, "AVG");
  EXPECT_FSDP2_ERROR(fsdp2::new_group({0, 0}), kInvalidArgument, "each rank may occur once");
  EXPECT_FSDP2_ERROR(fsdp2::new_group({2}), kInvalidArgument, "allowed are 0 to 1");
}

RANKS_TEST(ProcessGroup, SubGroupsHoldTheirRanks, 3) {
  const fsdp2::ProcessGroup pair = fsdp2::new_group({2, 0});
  if (rank == 1) {
    EXPECT_EQ(fsdp2::get_rank(pair), -1);
    EXPECT_FSDP2_ERROR(fsdp2::barrier(pair), kUsage, "not in the group");
    return;
  }
  EXPECT_EQ(fsdp2::get_rank(pair), rank == 2 ? 0 : 1);
  Tensor x = torch::full({1}, rank + 0.0);
  fsdp2::broadcast(x, 2, pair);
  EXPECT_EQ(x.item<double>(), 2);
  EXPECT_FSDP2_ERROR(fsdp2::broadcast(x, 1, pair), kInvalidArgument, "src must be one of them");
}

TEST(ProcessGroup, ALateRankIsATimeoutNamingTheOperation) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    fsdp2::init_process_group(options("file://" + folder.path() + "/store", rank, 2, milliseconds(1500)));
    if (rank == 0) {
      Tensor x = torch::ones({4});
      EXPECT_FSDP2_ERROR(fsdp2::all_reduce(x), kTimeout, "all_reduce");
    } else {
      std::this_thread::sleep_for(std::chrono::seconds(4));
    }
    fsdp2::destroy_process_group();
  }, {.init_process_group = false}));
}

TEST(DeviceMesh, AxesNamesAndSubMeshes) {
  ASSERT_TRUE(run_ranks(4, [](int rank) {
    const auto mesh = fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    EXPECT_EQ(mesh.ndim(), 2);
    EXPECT_EQ(*mesh.get_coordinate(), (std::vector<int64_t>{rank / 2, rank % 2}));
    EXPECT_EQ(fsdp2::get_process_group_ranks(mesh.get_group("dp")), (std::vector<int>{rank % 2, rank % 2 + 2}));
    EXPECT_EQ(fsdp2::get_process_group_ranks(mesh["tp"].get_group(0)),
              (std::vector<int>{rank / 2 * 2, rank / 2 * 2 + 1}));
    const auto flat = mesh.flatten({"dp", "tp"}, "all");
    EXPECT_EQ(flat.size(), 4);
    EXPECT_EQ(flat.get_local_rank("all"), rank);
    // Equal meshes share communicators.
    const auto again = fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    EXPECT_TRUE(mesh == again);
    EXPECT_EQ(mesh.get_group("dp").get(), again.get_group("dp").get());
    EXPECT_EQ(flat.get_group(0).get(), fsdp2::default_group().get());
    const auto from = fsdp2::DeviceMesh::from_group(mesh.get_group("tp"), torch::kCPU, {"x"});
    EXPECT_EQ(from.get_group("x").get(), mesh.get_group("tp").get());
    EXPECT_FSDP2_ERROR(mesh["pp"], kNotFound, "there are \"dp\", \"tp\"");
    EXPECT_FSDP2_ERROR((mesh[std::vector<std::string>{"tp", "dp"}]), kInvalidArgument, "order");
    EXPECT_FSDP2_ERROR(fsdp2::init_device_mesh(torch::kCPU, {5}), kInvalidArgument, "the job has 4 ranks");
    EXPECT_FSDP2_ERROR(fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"a", "a"}), kInvalidArgument, "repeat");
    EXPECT_FSDP2_ERROR(mesh.get_group(2), kInvalidArgument, "allowed are 0 to 1");
    // A mesh that leaves ranks out.
    const auto part = fsdp2::DeviceMesh(torch::kCPU, torch::tensor({int64_t{3}, int64_t{1}}));
    EXPECT_EQ(part.get_coordinate().has_value(), rank % 2 == 1);
    if (rank % 2 == 1) {
      EXPECT_EQ(part.get_local_rank(0), rank == 3 ? 0 : 1);
    } else {
      EXPECT_FSDP2_ERROR(part.get_group(0), kUsage, "outside");
    }
  }));
}

}  // namespace
