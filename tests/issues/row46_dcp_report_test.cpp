// A load into another dtype, or from a checkpoint with other keys, is reported; what loses
// information is an error.

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>
#include <torch/torch.h>

#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

TEST(Row46, NarrowingIsAnErrorUnlessAllowedAndEveryDifferenceIsReported) {
  const TempDir folder;
  const std::string path = folder.path() + "/ckpt";
  dcp::save({{"x", torch::tensor({1.7f, 2.9f})},
             {"half", torch::ones({2}, torch::kBFloat16)},
             {"step", torch::ones({1})},
             {"extra", 1}},
            path);

  dcp::StateDict target{{"x", torch::zeros({2}, torch::kLong)}};
  EXPECT_FSDP2_ERROR(dcp::load(target, path), kInvalidArgument, "x is float32 in the checkpoint, the target is int64");
  EXPECT_TRUE(target["x"].tensor().equal(torch::zeros({2}, torch::kLong)));
  target = {{"x", torch::zeros({2}, torch::kBFloat16)}};
  EXPECT_FSDP2_ERROR(dcp::load(target, path), kInvalidArgument, "allow_narrowing");

  target = {{"x", torch::zeros({2}, torch::kLong)},
            {"half", torch::zeros({2})},
            {"step", torch::zeros({})},
            {"absent", torch::zeros({2})}};
  const dcp::LoadReport report = dcp::load(target, path, {.allow_partial = true, .allow_narrowing = true});
  EXPECT_TRUE(target["x"].tensor().equal(torch::tensor({1, 2}, torch::kLong)));
  EXPECT_TRUE(target["half"].tensor().equal(torch::ones({2})));
  EXPECT_EQ(target["step"].tensor().item<float>(), 1);
  EXPECT_EQ(report.loaded, (std::vector<std::string>{"x", "half", "step"}));
  EXPECT_EQ(report.cast, (std::vector<std::string>{"x", "half"}));
  EXPECT_EQ(report.reshaped, (std::vector<std::string>{"step"}));
  EXPECT_EQ(report.missing, (std::vector<std::string>{"absent"}));
  EXPECT_EQ(report.unexpected, (std::vector<std::string>{"extra"}));
}

TEST(Row46, WideningIsReportedOnly) {
  const TempDir folder;
  const std::string path = folder.path() + "/ckpt";
  dcp::save({{"half", torch::full({2}, 1.5, torch::kBFloat16)}, {"small", torch::full({2}, -3, torch::kChar)}}, path);
  dcp::StateDict target{{"half", torch::zeros({2})}, {"small", torch::zeros({2}, torch::kBFloat16)}};
  EXPECT_EQ(dcp::load(target, path).cast.size(), 2u);
  EXPECT_TRUE(target["half"].tensor().equal(torch::full({2}, 1.5f)));
  EXPECT_TRUE(target["small"].tensor().equal(torch::full({2}, -3, torch::kBFloat16)));
}

}  // namespace
}  // namespace fsdp2::testing
