// labels: ranks
// A full disk, a file size limit, a folder that may not be written, files that are cut or removed while they are read:
// an error that names the file, the newest complete checkpoint loads bit by bit, nothing is left behind.

#include <fsdp2/fsdp2.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <iostream>

#include "dcp/hooked_storage.h"
#include "dcp/same.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;
using dcp::CheckpointManager;
using dcp::StateDict;

constexpr int64_t kElements = 400'000;  // 1.6 MB

StateDict state_of(float value, int64_t elements = kElements) {
  StateDict state{{"step", static_cast<int64_t>(value)}};
  state["w"] = is_initialized() ? distribute_tensor(torch::arange(elements, torch::kFloat) + value,
                                                    init_device_mesh(c10::kCPU, {get_world_size()}), {Shard{0}})
                                      .tensor()
                                : torch::arange(elements, torch::kFloat) + value;
  return state;
}

/// Step 1 is complete, saving step 2 fails with `text`: step 1 is loaded, and the folder holds nothing else.
void expect_failed_save(const fs::path& run, const char* text) {
  CheckpointManager manager(run);
  EXPECT_FSDP2_ERROR(manager.save(2, state_of(2)), kIo, text);
  EXPECT_FSDP2_ERROR(manager.save(2, state_of(2)), kIo, ".distcp");
  StateDict loaded = state_of(0);
  const dcp::ResumeReport resumed = manager.load_latest(loaded);
  ASSERT_TRUE(resumed.checkpoint);
  EXPECT_EQ(resumed.checkpoint->step, 1);
  EXPECT_TRUE(resumed.skipped.empty());
  EXPECT_TRUE(same(loaded, state_of(1)));
  EXPECT_EQ(std::distance(fs::directory_iterator(run), fs::directory_iterator()), 1) << "something is left";
}

TEST(DiskFaults, AFullDisk) {
  const TempDir folder;
  const fs::path disk = folder.path() + "/disk";
  fs::create_directory(disk);
  // In a mount namespace of this process: it goes with it, whatever happens.
  const bool mounted = ::unshare(CLONE_NEWNS) == 0 &&
                       ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                       ::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=2500k") == 0;
  if (!mounted)
    GTEST_SKIP() << "a tmpfs cannot be mounted here (" << std::strerror(errno)
                 << "); DiskFaults.AFileSizeLimit is what remains";
  std::cout << "on a tmpfs of 2500 KiB" << std::endl;
  for (const int ranks : {1, 2}) {
    EXPECT_TRUE(run_ranks(ranks, [&](int rank) {
      const fs::path run = disk / std::to_string(ranks);
      CheckpointManager(run).save(1, state_of(1));
      expect_failed_save(run, "No space left");
      barrier();
      if (rank == 0) fs::remove_all(run);
    }));
  }
  ::umount2(disk.c_str(), MNT_DETACH);
}

TEST(DiskFaults, AFileSizeLimit) {
  const TempDir folder;
  EXPECT_TRUE(run_ranks(2, [&](int rank) {
    const fs::path run = folder.path() + "/run";
    CheckpointManager(run).save(1, state_of(1));
    if (rank == 1) {
      std::signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{100'000, 100'000};
      ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    }
    expect_failed_save(run, "File too large");
  }));
}

TEST(DiskFaults, AFolderThatMayOnlyBeRead) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(1,
                        [&](int) {
                          ::chmod(folder.path().c_str(), 0755);
                          const fs::path run = folder.path() + "/run";
                          CheckpointManager(run).save(1, state_of(1));
                          ASSERT_EQ(::chmod(run.c_str(), 0555), 0);
                          if (::geteuid() == 0) {  // root may write anywhere
                            ASSERT_EQ(::seteuid(65534), 0);
                          }
                          CheckpointManager manager(run);
                          EXPECT_FSDP2_ERROR(manager.save(2, state_of(2)), kIo, "Permission denied");
                          EXPECT_FSDP2_ERROR(CheckpointManager(run / "step-00000001" / "deep").save(2, state_of(2)),
                                             kIo, "Permission denied");
                          StateDict loaded = state_of(0);
                          EXPECT_EQ(manager.load_latest(loaded).checkpoint->step, 1);
                          EXPECT_TRUE(same(loaded, state_of(1)));
                          if (::getuid() == 0) {
                            ASSERT_EQ(::seteuid(0), 0);
                          }
                          ::chmod(run.c_str(), 0755);
                        },
                        {.init_process_group = false}));
}

// Before read number k of a load of the newest checkpoint, for every k.
TEST(DiskFaults, FilesThatAreCutOrRemovedWhileTheyAreRead) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(1,
                        [&](int) {
                          set_log_sink([](LogLevel, const std::string&) {});
                          const fs::path run = folder.path() + "/run", newest = run / "step-00000002",
                                         whole = folder.path() + "/whole";
                          constexpr int64_t kFew = 3000;
                          CheckpointManager(run).save(1, state_of(1, kFew));
                          CheckpointManager(run).save(2, state_of(2, kFew));
                          fs::rename(newest, whole);
                          int fallbacks = 0;
                          for (const std::string fault : {"cut", "removed", "emptied"}) {
                            bool reached = true;
                            for (int point = 1; reached; ++point) {
                              fs::remove_all(newest);
                              fs::copy(whole, newest, fs::copy_options::recursive);
                              int count = 0;
                              const auto storage = std::make_shared<HookedStorage>([&](const std::string& operation,
                                                                                       const std::string& name) {
                                const bool of_newest = name.find(newest.string() + "/") != std::string::npos;
                                if (!of_newest || (operation != "open" && operation != "read") || ++count != point)
                                  return;
                                for (const auto& entry : fs::directory_iterator(newest)) {
                                  if (fault == "removed") {
                                    fs::remove(entry.path());
                                  } else {
                                    fs::resize_file(entry.path(), fault == "cut" ? fs::file_size(entry.path()) - 1 : 0);
                                  }
                                }
                              });
                              const std::string where = fault + " before read " + std::to_string(point);
                              CheckpointManager manager(run, {.save = {.storage = storage}});
                              StateDict loaded = state_of(0, kFew);
                              const dcp::ResumeReport resumed = manager.load_latest(loaded);
                              ASSERT_TRUE(resumed.checkpoint) << where;
                              const auto step = static_cast<float>(resumed.checkpoint->step);
                              EXPECT_TRUE(same(loaded, state_of(step, kFew))) << where;
                              reached = count >= point;
                              if (step == 1) {
                                ++fallbacks;
                                ASSERT_EQ(resumed.skipped.size(), 1u) << where;
                                EXPECT_NE(resumed.skipped[0].reason.find("step-00000002"), std::string::npos)
                                    << where << ": " << resumed.skipped[0].reason;
                              } else if (!reached) {
                                EXPECT_EQ(step, 2) << where;
                              }
                            }
                          }
                          EXPECT_GE(fallbacks, 10);
                        },
                        {.init_process_group = false}));
}

}  // namespace
}  // namespace fsdp2::testing
