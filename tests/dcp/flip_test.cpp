// labels: ranks
// 200 random single-byte flips in each of several layouts: each is an error when the checkpoint is loaded, or changes
// nothing that is loaded; verify() names the file; a manager steps over the checkpoint.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "dcp/same.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;
using dcp::StateDict;

StateDict state_of(float value) {
  const bool joined = is_initialized();
  const auto shard = [&](const torch::Tensor& whole) {
    return joined ? distribute_tensor(whole, init_device_mesh(c10::kCPU, {get_world_size()}), {Shard{0}}).tensor()
                  : whole;
  };
  StateDict state;
  state["w"] = shard(torch::arange(60, torch::kFloat).reshape({12, 5}) * value);
  state["half"] = shard((torch::arange(33) * value).to(torch::kBFloat16));
  state["plain"] = torch::full({7}, value, torch::kDouble);
  state["ids"] = torch::arange(9) + static_cast<int64_t>(value);
  state["scalar"] = torch::full({}, value);
  state["empty"] = torch::zeros({0, 3});
  state["meta"] = StateDict{{"step", static_cast<int64_t>(value)}, {"name", "run"}, {"lr", 0.5 * value}};
  return state;
}

void write(const fs::path& file, const std::string& content) {
  std::ofstream(file, std::ios::binary | std::ios::trunc) << content;
}

struct Layout {
  const char* name;
  dcp::SaveOptions options;
};

void flip_all(const fs::path& run, const std::string& layout) {
  set_log_sink([](LogLevel, const std::string&) {});
  const fs::path newest = run / "step-00000002";
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(newest)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  ASSERT_GE(files.size(), 3u) << layout;
  const StateDict expected = state_of(2);
  EXPECT_TRUE(dcp::verify(newest).ok());
  std::mt19937_64 random(7);
  int detected = 0, harmless = 0;
  for (int i = 0; i < 200; ++i) {
    const fs::path& file = files[static_cast<size_t>(i) % files.size()];
    const std::string whole = read_file(file);
    ASSERT_FALSE(whole.empty());
    std::string flipped = whole;
    const size_t at = random() % whole.size();
    flipped[at] = static_cast<char>(flipped[at] ^ static_cast<char>(1 << random() % 8));
    write(file, flipped);
    const std::string where = layout + ": " + file.filename().string() + " of " + std::to_string(whole.size()) +
                              " bytes, byte " + std::to_string(at);
    StateDict loaded = state_of(0);
    try {
      dcp::load(loaded, newest);
      EXPECT_TRUE(same(loaded, expected)) << where << " is loaded wrong";
      ++harmless;
    } catch (const Error& error) {
      ++detected;
      const dcp::VerifyReport report = dcp::verify(newest);
      EXPECT_FALSE(report.ok()) << where << " is not seen by verify(), load says " << error.what();
      dcp::CheckpointManager manager(run);
      loaded = state_of(0);
      try {
        const dcp::ResumeReport resumed = manager.load_latest(loaded);
        ASSERT_TRUE(resumed.checkpoint) << where;
        EXPECT_EQ(resumed.checkpoint->step, 1) << where;
        EXPECT_TRUE(same(loaded, state_of(1))) << where;
        ASSERT_EQ(resumed.skipped.size(), 1u) << where;
        EXPECT_EQ(resumed.skipped[0].name, "step-00000002") << where;
      } catch (const Error& refused) {
        ADD_FAILURE() << where << ": the manager does not step over it: " << refused.what();
      }
    }
    write(file, whole);
  }
  EXPECT_GE(detected, 150) << layout << ": " << harmless << " flips changed nothing";
  StateDict loaded = state_of(0);
  dcp::load(loaded, newest);
  EXPECT_TRUE(same(loaded, expected));
}

TEST(Flips, OfAnyByteAreErrorsOrChangeNothing) {
  const TempDir folder;
  const std::vector<Layout> layouts = {{"one file a rank", {}},
                                       {"two files a rank", {.files_per_rank = 2}},
                                       {"safetensors", {.safetensors = true}},
                                       {"zstd", {.zstd = true}}};
  for (const Layout& layout : layouts) {
    const fs::path run = folder.path() + "/" + layout.name;
    ASSERT_TRUE(run_ranks(2, [&](int) {
      dcp::CheckpointManager manager(run, {.save = layout.options});
      manager.save(1, state_of(1));
      manager.save(2, state_of(2));
    })) << layout.name;
    EXPECT_TRUE(run_ranks(1, [&](int) { flip_all(run, layout.name); }, {.init_process_group = false}));
  }
}

}  // namespace
}  // namespace fsdp2::testing
