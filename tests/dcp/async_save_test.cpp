// labels: ranks
// Saves in the background: what is saved is the state of the call; one at a time; errors come up; nothing is lost at
// the end of a process.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <thread>

#include "dcp/hooked_storage.h"
#include "dcp/same.h"
#include "support/process_status.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;

/// Holds a save back before its first file until it is opened.
class Gate {
 public:
  std::shared_ptr<dcp::Storage> storage() {
    return std::make_shared<HookedStorage>([this](const std::string& operation, const std::string&) {
      if (operation != "create") return;
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return open_; });
    });
  }
  void open() {
    const std::lock_guard guard(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

torch::Tensor loaded(const std::string& path, const std::string& key, const torch::Tensor& like) {
  dcp::StateDict target{{key, torch::zeros_like(like)}};
  dcp::load(target, path, {.allow_partial = true});
  return target.at(key).tensor();
}

// The collectives of the training go on between those of the save.
TEST(AsyncSave, StoresTheStateOfTheCall) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {2});
    const torch::Tensor whole = torch::arange(40, torch::kFloat).reshape({10, 4});
    const DTensor sharded = distribute_tensor(whole, mesh, {Shard{0}});
    torch::Tensor plain = torch::ones({3}), inside = torch::full({2}, 5.0f), turned = torch::rand({4, 6}).t();
    if (rank == 1) turned.copy_(torch::zeros_like(turned));
    broadcast(turned, 0);
    const torch::Tensor turned_then = turned.clone();
    dcp::StateDict state{{"plain", plain},
                         {"sharded", sharded.tensor()},
                         {"turned", turned},
                         {"pair", dcp::Value::tuple({inside, 1})},
                         {"step", 1}};
    Gate gate;
    const std::string path = folder.path() + "/ckpt";
    const dcp::SaveFuture future = dcp::async_save(state, path, {.storage = gate.storage()});
    plain.fill_(7);
    inside.fill_(7);
    turned.fill_(7);
    DTensor(sharded).to_local().fill_(7);
    state["step"] = 2;
    for (int i = 0; i < 50; ++i) {
      torch::Tensor value = torch::full({1000}, static_cast<float>(rank));
      all_reduce(value);
      EXPECT_TRUE(value.equal(torch::ones({1000})));
    }
    EXPECT_FALSE(future.ready());
    gate.open();
    const dcp::Metadata metadata = future.get();
    EXPECT_EQ(metadata.entries.size(), 5u);
    EXPECT_TRUE(future.ready());
    EXPECT_EQ(future.progress().done > 0, true);

    dcp::Reader reader(path);
    EXPECT_TRUE(reader.read("plain").tensor().equal(torch::ones({3})));
    EXPECT_TRUE(reader.read("sharded").tensor().equal(whole));
    EXPECT_TRUE(reader.read("turned").tensor().equal(turned_then));
    EXPECT_TRUE(reader.read("pair").list()[0].tensor().equal(torch::full({2}, 5.0f)));
    EXPECT_EQ(reader.read("step").integer(), 1);
  }));
}

TEST(AsyncSave, LoadsAndSavesWaitForTheOneThatRuns) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int) {
    const std::string path = folder.path() + "/ckpt";
    for (int i = 0; i < 3; ++i) {
      Gate gate;
      const torch::Tensor values = torch::full({5}, static_cast<float>(i));
      const dcp::SaveFuture future =
          dcp::async_save({{"x", values}}, path, {.overwrite = true, .storage = gate.storage()});
      std::thread opener([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        gate.open();
      });
      if (i == 1) {
        dcp::save({{"x", values}}, folder.path() + "/other");
        EXPECT_TRUE(future.ready());
      }
      EXPECT_TRUE(loaded(path, "x", values).equal(values));
      EXPECT_TRUE(future.ready());
      opener.join();
    }
  }));
}

TEST(AsyncSave, ErrorsComeFromTheFutureOrTheNextCallOnEveryRank) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int rank) {
    const dcp::StateDict good{{"x", torch::ones({2})}};
    dcp::StateDict bad{{"x", torch::ones({2})}};
    if (rank == 1) bad["x"] = torch::empty({2}, torch::kMeta);
    const dcp::SaveFuture future = dcp::async_save(bad, folder.path() + "/a");
    EXPECT_FSDP2_ERROR(future.wait(), kInvalidArgument, "rank 1 failed");
    EXPECT_FSDP2_ERROR(future.get(), kInvalidArgument, "meta device");
    dcp::save(good, folder.path() + "/a");  // it was seen: not told again

    // Nobody asks: the next call says it, wherever it was seen.
    const dcp::SaveFuture unseen = dcp::async_save(good, folder.path() + "/a");
    if (rank == 0) EXPECT_FSDP2_ERROR(unseen.wait(), kInvalidArgument, "not empty");
    dcp::StateDict target{{"x", torch::zeros({2})}};
    EXPECT_FSDP2_ERROR(dcp::load(target, folder.path() + "/a"), kInvalidArgument, "rank 1 failed");
    dcp::load(target, folder.path() + "/a");
    EXPECT_TRUE(target.at("x").tensor().equal(torch::ones({2})));

    // Where no rank has asked, every rank hears of it once.
    dcp::async_save(good, folder.path() + "/a");
    EXPECT_FSDP2_ERROR(dcp::load(target, folder.path() + "/a"), kInvalidArgument, "rank 0 failed");
    dcp::load(target, folder.path() + "/a");

    const dcp::SaveFuture again = dcp::async_save(good, folder.path() + "/a");
    const dcp::SaveFuture next = dcp::async_save(good, folder.path() + "/b");
    EXPECT_FSDP2_ERROR(next.wait(), kInvalidArgument, "before this call had failed");
    EXPECT_FSDP2_ERROR(dcp::SaveFuture().wait(), kUsage, "belongs to no save");
    dcp::async_save(good, folder.path() + "/b").wait();
  }));
}

TEST(AsyncSave, BuffersAreUsedAgainAndPlansToo) {
  const TempDir folder;
  ASSERT_TRUE(
      run_ranks(1,
                [&](int) {
                  constexpr int64_t kElements = 8 << 20;  // 32 MiB
                  torch::Tensor values = torch::zeros({kElements});
                  const std::string path = folder.path() + "/ckpt";
                  size_t after_first = 0;
                  for (int i = 0; i < 6; ++i) {
                    values.fill_(i);
                    dcp::async_save({{"x", values}, {"step", i}}, path, {.overwrite = true}).wait();
                    if (i == 0) after_first = (static_cast<size_t>(process_status("VmRSS")) << 10);
                  }
                  EXPECT_LT((static_cast<size_t>(process_status("VmRSS")) << 10), after_first + (size_t{8} << 20))
                      << "a copy of the state was made anew";
                  EXPECT_EQ(dcp::Reader(path).read("step").integer(), 5);
                  EXPECT_TRUE(loaded(path, "x", values).equal(values));
                  dcp::release_async_buffers();
                  EXPECT_LT((static_cast<size_t>(process_status("VmRSS")) << 10) + (size_t{24} << 20),
                            after_first + (size_t{8} << 20))
                      << "the copy was not freed";
                  // Another layout: the old buffers do not fit.
                  const torch::Tensor other = torch::arange(7, torch::kInt64);
                  dcp::async_save({{"y", other}, {"z", other.to(torch::kHalf)}}, path, {.overwrite = true}).wait();
                  EXPECT_TRUE(loaded(path, "y", other).equal(other));
                },
                {.init_process_group = false}));
}

// _exit would lose it; exit and the end of main do not.
TEST(AsyncSave, TheEndOfAProcessWaits) {
  const TempDir folder;
  for (const bool destroy : {false, true}) {
    const std::string path = folder.path() + (destroy ? "/destroyed" : "/ended");
    ASSERT_TRUE(run_ranks(2, [&](int) {
      auto* storage = new std::shared_ptr<dcp::Storage>(
          std::make_shared<HookedStorage>([](const std::string& operation, const std::string&) {
            if (operation == "create") std::this_thread::sleep_for(std::chrono::milliseconds(100));
          }));
      dcp::async_save({{"x", torch::ones({4})}}, path, {.storage = *storage});
      if (destroy) {
        destroy_process_group();
      } else {
        std::exit(::testing::Test::HasFailure() ? 1 : 0);
      }
    }));
    EXPECT_TRUE(dcp::Reader(path).read("x").tensor().equal(torch::ones({4}))) << path;
  }
}

}  // namespace
}  // namespace fsdp2::testing
