// labels: peer
// needs: programs
// The program `fsdp2 checkpoint` as a process: what it makes of Python's checkpoints, and what it refuses.

#include <fsdp2/dcp/dcp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "launcher/launch.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;

ProcessResult checkpoint(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {fsdp2_program(), "checkpoint"});
  return run_process(arguments, {"OMP_NUM_THREADS=1"});
}

/// Names in a folder, also hidden ones.
std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

/// Flips a bit of the first two elements of weights()["lm_head.weight"] in checkpoint_peer.py.
void damage(const std::string& path) {
  const float start[] = {2.0f, -11.75f};
  std::string content = read_file(path);
  const size_t at = content.find(std::string(reinterpret_cast<const char*>(start), sizeof(start)));
  ASSERT_NE(at, std::string::npos);
  content[at + 5] ^= 0x10;
  std::ofstream(path, std::ios::binary) << content;
}

/// Checkpoints that Python made, once for all tests.
class CheckpointProgram : public ::testing::Test {
 public:
  static void SetUpTestSuite() {
    folder_ = new TempDir;
    const ProcessResult made = run_python(test_file("peer/checkpoint_peer.py"), {"make", path("")});
    ASSERT_EQ(made.exit_code, 0) << made.output;
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }

 protected:
  static std::string path(const std::string& name) { return folder_->path() + "/" + name; }

  /// Runs the program, which has to succeed; returns what it printed.
  static std::string good(const std::vector<std::string>& arguments) {
    const ProcessResult result = checkpoint(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.output;
    return result.output;
  }
  /// It has to fail with this code and text, and to leave the folder as it was.
  static void bad(const std::vector<std::string>& arguments, int code, const std::string& text) {
    SCOPED_TRACE(text);
    const std::vector<std::string> before = names_in(folder_->path());
    const ProcessResult result = checkpoint(arguments);
    EXPECT_EQ(result.exit_code, code) << result.output;
    EXPECT_NE(result.output.find(text), std::string::npos) << result.output;
    EXPECT_EQ(names_in(folder_->path()), before);
  }
  static void expect(const std::string& output, std::initializer_list<const char*> parts) {
    for (const char* part : parts) EXPECT_NE(output.find(part), std::string::npos) << part << "\nin\n" << output;
  }

 private:
  static inline TempDir* folder_ = nullptr;
};

TEST_F(CheckpointProgram, PythonReadsWhatItMakesOfPythonsCheckpoints) {
  const std::string tied = "lm_head.weight=embed.weight";
  std::string out = good({"convert", path("py"), path("out_hf"), "--keys", "model.*", "--rename", "model.*=*", "--tied",
                          tied, "--max-file-size", "110"});
  expect(out,
         {"writing 357 B", "checking 357 B", "11 tensors of 357 B, 0 values, 5 files; read back and equal",
          "renamed 12 keys: model.embed.weight -> embed.weight", "tied, written once: lm_head.weight = embed.weight"});
  out = good({"convert", path("py"), path("one.safetensors"), "--keys", "model.*"});
  expect(out, {"12 tensors", "1 file;",
               "equal bytes (say --tied if they are one weight): model.embed.weight, model.lm_head.weight"});
  expect(good({"reshard", path("py"), path("r3"), "--ranks", "3"}),
         {"DCP with 13 tensors of 473 B, 5 values, 3 files"});
  // The tied weight is not in the source: it is made.
  out = good({"convert", path("hf"), path("from_hf"), "--rename", "*=model.*", "--ranks", "2", "--tied",
              "model.lm_head.weight=model.embed.weight"});
  expect(out, {"12 tensors", "2 files", "tied, written under both names: model.lm_head.weight = model.embed.weight"});
  good({"convert", path("hf_shards"), path("from_shards")});
  good({"convert", path("state.pt"), path("from_pt")});
  good({"convert", path("py"), path("out.pt")});
  expect(good({"convert", path("py"), path("bf16"), "--to", "dcp", "--dtype", "bfloat16"}),
         {"cast to bfloat16: 6 tensors"});
  good({"convert", path("linear.pt"), path("linear")});
  const ProcessResult python = run_python(test_file("peer/checkpoint_peer.py"), {"check", path("")});
  EXPECT_EQ(python.exit_code, 0) << python.output;
  // And all of it is whole for us, with the checksums that were written along.
  for (const char* name : {"r3", "from_hf", "from_shards", "from_pt", "bf16", "linear"}) {
    const dcp::VerifyReport report = dcp::verify(path(name));
    EXPECT_TRUE(report.ok() && report.has_checksums) << name << (report.ok() ? "" : report.faults[0].text);
  }
}

TEST_F(CheckpointProgram, RenamesByExpressionsAndByFile) {
  std::ofstream(path("rules")) << "# ours=theirs\nlayers.*.weight=h.*.w\n/^norm[.]/=ln.\n*=other.*\n";
  expect(good({"convert", path("hf"), path("renamed"), "--keys", "layers.*", "--keys", "norm.scale", "--keys", "ids",
               "--rename-file", path("rules"), "--rename", "/^(layers)[.]0[.](perm)/=$2_$1.0."}),
         {"5 tensors", "renamed 5 keys: "});
  const std::string out = good({"inspect", path("renamed")});
  expect(out, {"\nh.0.w  ", "\nh.1.w  ", "\nln.scale  ", "\nother.ids  ", "\nperm_layers.0.uted  "});
}

TEST_F(CheckpointProgram, RefusesWhatMakesNoSense) {
  const std::string to = path("not_made");
  bad({"convert", path("hf"), to, "--keys", "layer.*"}, 2, "the pattern for keys 'layer.*' matches no key");
  bad({"convert", path("hf"), to, "--rename", "head.*=*"}, 2, "the rule 'head.*' to '*' matches no key");
  bad({"convert", path("hf"), to, "--rename", "ids"}, 2, "it is written FROM=TO");
  bad({"convert", path("hf"), to, "--rename", "/(/=x"}, 2, "is not a regular expression");
  bad({"convert", path("hf"), to, "--rename", "ids=*"}, 2, "has more stars than the pattern");
  bad({"convert", path("hf"), to, "--rename", "layers.*.weight=w"}, 2, "would both be called 'w'");
  bad({"convert", path("hf"), to, "--rename", "ids=mask"}, 2, "would both be called 'mask'");
  bad({"convert", path("hf"), to, "--tied", "a=b"}, 2,
      "'a' is said to be tied to 'b', but the destination has no tensor");
  bad({"convert", path("hf"), to, "--tied", "layers.1.weight=embed.weight"}, 2, "but they are not equal");
  bad({"convert", path("hf"), to, "--dtype", "bfloat61"}, 2, "there is no dtype 'bfloat61'");
  bad({"convert", path("hf"), to, "--dtype", "int8"}, 2, "cannot cast to int8");
  bad({"convert", path("hf"), to, "--cast", "*"}, 2, "no dtype to cast to");
  bad({"convert", path("hf"), to, "--dtype", "float16", "--cast", "nobody*"}, 2, "the pattern for casts 'nobody*'");
  bad({"convert", path("odd.pt"), to, "--dtype", "float16", "--keys", "h*"}, 2,
      "'huge' holds values that float16 cannot");
  bad({"convert", path("odd.pt"), path("odd.safetensors")}, 2, "'weird' has the dtype complex128");
  bad({"convert", path("py"), path("x.safetensors"), "--keys", "step"}, 2, "has no tensors to convert");
  bad({"convert", path("py"), path("x.pt"), "--to", "dcp"}, 2, "is the name of a torch.save file");
  bad({"convert", path("py"), to, "--to", "onnx"}, 2, "onnx");
  bad({"reshard", path("py"), to, "--ranks", "0"}, 2, "ranks = 0");
  bad({"reshard", path("py"), to}, 2, "--ranks is required");
  bad({"convert", path("nothing"), to}, 1, "there is nothing at");
  bad({"convert", path("py/__0_0.distcp"), to}, 2, "is one file of a checkpoint");
  bad({"inspect", path("rules_")}, 1, "there is nothing at");
  bad({"inspect", path("py"), "--keys", "nope"}, 2, "matches no key");
  bad({}, 2, "subcommand");
  bad({"prune"}, 2, "there is no 'checkpoint prune'; there are: inspect, verify, convert, reshard");
}

TEST_F(CheckpointProgram, ReplacesOnlyWhenTold) {
  good({"convert", path("hf"), path("twice"), "--to", "dcp"});
  good({"convert", path("hf"), path("twice.safetensors"), "--keys", "ids"});
  bad({"convert", path("py"), path("twice"), "--to", "dcp"}, 2, "cannot save to");
  bad({"convert", path("hf"), path("twice.safetensors"), "--keys", "mask"}, 2, "is there already");
  expect(good({"inspect", path("twice.safetensors")}), {"ids"});
  good({"convert", path("hf"), path("twice.safetensors"), "--keys", "mask", "--overwrite"});
  expect(good({"inspect", path("twice.safetensors")}), {"1 tensor of 3 B", "mask"});
  // A folder of safetensors gives way to a DCP folder, and the other way round.
  good({"convert", path("twice"), path("twice"), "--overwrite"});
  expect(good({"inspect", path("twice")}), {"safetensors, 11 tensors"});
  good({"reshard", path("twice"), path("twice"), "--ranks", "2", "--overwrite"});
  expect(good({"inspect", path("twice")}), {"DCP, 11 tensors", "written by 2 ranks"});
  for (const std::string& name : names_in(path("")))
    EXPECT_EQ(name.find(".staging-"), std::string::npos) << name << ": what was replaced is gone";
  // Other things are left alone.
  fs::create_directory(path("mine"));
  std::ofstream(path("mine/thesis.tex")) << "...";
  bad({"convert", path("hf"), path("mine"), "--overwrite"}, 2, "thesis.tex");
}

TEST_F(CheckpointProgram, DamageEndsWithOneAndNothingIsWritten) {
  fs::copy(path("py"), path("flipped"));
  damage(path("flipped/__1_0.distcp"));
  const ProcessResult verified = checkpoint({"verify", path("flipped")});
  EXPECT_EQ(verified.exit_code, 1) << verified.output;
  expect(verified.output, {"1 fault\n", "__1_0.distcp, offset ", ", key model.lm_head.weight: "});
  bad({"convert", path("flipped"), path("never")}, 1, "__1_0.distcp (model.lm_head.weight)");
  expect(good({"verify", path("py")}), {"3 files, 22 items", "no faults", "there is no .checksums file"});

  fs::copy(path("hf"), path("cut"));
  fs::resize_file(path("cut/model-00002-of-00002.safetensors"),
                  fs::file_size(path("cut/model-00002-of-00002.safetensors")) - 1);
  bad({"convert", path("cut"), path("never")}, 1, "model-00002-of-00002.safetensors");
  fs::remove(path("cut/model-00002-of-00002.safetensors"));
  bad({"convert", path("cut"), path("never")}, 1, "which is not there");
  fs::remove(path("cut/model.safetensors.index.json"));
  expect(good({"inspect", path("cut")}), {"1 file"});

  fs::copy(path("hf_shards"), path("hole"));
  fs::remove(path("hole/shard-00001-model-00001-of-00001.safetensors"));
  bad({"convert", path("hole"), path("never")}, 1, "its chunks hold");
  fs::copy(path("hf/model-00001-of-00002.safetensors"), path("hf_shards/again.safetensors"));
  bad({"inspect", path("hf_shards")}, 1, "overlap");
  fs::remove(path("hf_shards/again.safetensors"));

  fs::copy(path("py"), path("died"));
  fs::remove(path("died/.metadata"));
  bad({"inspect", path("died")}, 1, "that save did not finish");
}

TEST_F(CheckpointProgram, InspectShowsWhatIsThere) {
  std::string out = good({"inspect", path("py"), "--values"});
  expect(out, {"DCP, 13 tensors of 473 B, 5 values, 2 files, written by 2 ranks",
               "model.embed.weight       float32        [7, 4]  112 B    2       __0_0.distcp, __1_0.distcp\n",
               "optim.groups.0.betas", "(0.9, 0.999)", "'grüße'", "[-3, -2, -1, 0, 1, 2]", "0.875-4.375j",
               "\nby dtype\n  value          5 keys  ", "\n  float32        7 keys  360 B\n",
               "\n  model  12 keys  469 B\n"});
  EXPECT_EQ(out.find("not part of"), std::string::npos);
  // Python left the file of a rank that the second save did not have.
  expect(good({"inspect", path("reused")}),
         {"1 file, written by 1 rank\n", "not part of the checkpoint", "  __1_0.distcp  1.5 KiB"});
  out = good({"inspect", path("hf_shards")});
  expect(out, {"safetensors, 7 tensors of 430 B, 0 values, 2 files", "DCP_VERSION: 1.0"});
  out = good({"inspect", path("state.pt"), "--keys", "optim.*", "--values", "--json"});
  expect(out, {"\"format\": \"torch.save\"", "\"key\": \"optim.step\"", "\"dtype\": \"float32\"", "\"value\": \"12\"",
               "\"by_top_level_key\"", "\"unreferenced\": []"});
  expect(good({"--help"}), {"inspect", "verify", "convert", "reshard", "Exit codes"});
  expect(good({"convert", "--help"}), {"--tied", "--max-file-size", "read back and compared"});
}

}  // namespace
}  // namespace fsdp2::testing
