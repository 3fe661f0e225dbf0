// labels: peer, ranks
// timeout: 600
// Checkpoints both ways with Python: world sizes 1 to 4 on either side, in all pairs.

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>
#include <fsdp2/tensor/dtensor.h>
#include <torch/torch.h>

#include "dcp/same.h"
#include "dcp/sample_state.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

constexpr int kWorlds[] = {1, 2, 3, 4};

TEST(DcpPeer, AllPairsOfWorldSizesBothWays) {
  const TempDir folder;
  for (int world : kWorlds) {
    ASSERT_TRUE(run_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh(c10::kCPU, {get_world_size()});
      dcp::save(sample_state(mesh, /*zero=*/false), folder.path() + "/cpp_" + std::to_string(world));
    }));
  }
  const ProcessResult python =
      run_python(test_file("peer/dcp_peer.py"), {folder.path(), "1", "2", "3", "4"}, std::chrono::seconds(400));
  ASSERT_EQ(python.exit_code, 0) << python.output;
  for (int world : kWorlds) {
    ASSERT_TRUE(run_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh(c10::kCPU, {get_world_size()});
      const dcp::StateDict expected = sample_state(mesh, /*zero=*/false);
      for (const char* writer : {"py", "cpp"}) {
        for (int saved : kWorlds) {
          dcp::StateDict loaded = sample_state(mesh, /*zero=*/true);
          const dcp::LoadReport report = dcp::load(loaded, folder.path() + "/" + writer + "_" + std::to_string(saved));
          EXPECT_TRUE(same(loaded, expected)) << writer << "_" << saved << " on " << world;
          EXPECT_TRUE(report.missing.empty() && report.unexpected.empty() && report.cast.empty() &&
                      report.reshaped.empty());
        }
      }
    }));
  }
  ASSERT_TRUE(run_ranks(1, [&](int) {
    dcp::Reader reader(folder.path() + "/py_3");
    const dcp::StateDict state = reader.read_all();
    EXPECT_TRUE(same(state, sample_state(init_device_mesh(c10::kCPU, {1}), /*zero=*/false)));
  }));
}

}  // namespace
}  // namespace fsdp2::testing
