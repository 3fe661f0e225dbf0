// labels: peer, ranks
// The state of the random number generators goes through a checkpoint, also to and from Python.

#include <fstream>

#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <fsdp2/fsdp2.h>

#include "support/ranks.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::RngState;
using fsdp2::dcp::StateDict;
using nlohmann::json;
using torch::Tensor;

std::vector<double> numbers(const Tensor& tensor) {
  const Tensor flat = tensor.to(torch::kDouble).reshape({-1}).contiguous();
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

/// draw() of rng_state_peer.py.
json draw() {
  json drawn = json::array();
  drawn.push_back(numbers(torch::rand({3})));
  drawn.push_back(numbers(torch::randn({5})));
  drawn.push_back(torch::randn({}, torch::kDouble).item<double>());
  drawn.push_back(numbers(torch::randperm(9)));
  return drawn;
}

TEST(RngState, EachSideDrawsOnWhereTheOtherSaved) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(1,
                        [&](int) {
                          torch::manual_seed(5);
                          draw();
                          fsdp2::dcp::save({{"rng", std::make_shared<RngState>()}}, folder.path() + "/cpp");
                          std::ofstream(folder.path() + "/next_cpp.json") << draw();
                        },
                        {.init_process_group = false}));
  const auto python = run_python(test_file("training/rng_state_peer.py"), {folder.path()});
  ASSERT_EQ(python.exit_code, 0) << python.output;
  const auto read = [&](const std::string& name) { return json::parse(std::ifstream(folder.path() + "/" + name)); };
  EXPECT_EQ(read("drawn_py.json"), read("next_cpp.json"));
  ASSERT_TRUE(run_ranks(1,
                        [&](int) {
                          torch::manual_seed((uint64_t{1} << 40) + 1);
                          draw();
                          fsdp2::dcp::Reader python(folder.path() + "/py");
                          RngState own;
                          EXPECT_TRUE(own.state_dict()["cpu"].tensor().equal(python.read("rng.cpu").tensor()))
                              << "another format";
                          torch::manual_seed(0);
                          StateDict state{{"rng", std::make_shared<RngState>()}};
                          fsdp2::dcp::load(state, folder.path() + "/py");
                          EXPECT_EQ(draw(), read("next_py.json"));
                        },
                        {.init_process_group = false}));
}

TEST(RngState, DropoutMasksGoOn) {
  RngState rng;
  torch::manual_seed(3);
  const auto mask = [] { return torch::dropout(torch::ones({50}), 0.5, true); };
  mask();
  const StateDict state = rng.state_dict();
  const Tensor next = mask();
  EXPECT_FALSE(mask().equal(next));
  rng.load_state_dict(state);
  EXPECT_TRUE(mask().equal(next));
}

TEST(RngState, ABadStateIsNamedAndChangesNothing) {
  RngState rng;
  torch::manual_seed(3);
  const StateDict good = rng.state_dict();
  const Tensor bytes = good.at("cpu").tensor();
  EXPECT_FSDP2_ERROR(rng.load_state_dict({}), kNotFound, "cpu");
  EXPECT_FSDP2_ERROR(rng.load_state_dict({{"cpu", 3}}), kInvalidArgument, "Int");
  EXPECT_FSDP2_ERROR(rng.load_state_dict({{"cpu", bytes.narrow(0, 0, 100)}}), kInvalidArgument, "[100]");
  EXPECT_FSDP2_ERROR(rng.load_state_dict({{"cpu", bytes.to(torch::kInt)}}), kInvalidArgument, "Int");
  EXPECT_FSDP2_ERROR(rng.load_state_dict({{"cpu", torch::full_like(bytes, 255)}}), kInvalidArgument, "refuses");
  EXPECT_TRUE(rng.state_dict()["cpu"].tensor().equal(bytes));
}

}  // namespace
