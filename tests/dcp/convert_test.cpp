// labels: ranks
// Converting from C++: the cuts of fully_shard, patterns, pieces, values that do not fit, and a result that changed.

#include <ATen/ATen.h>
#include <dirent.h>
#include <dlfcn.h>
#include <fsdp2/dcp/convert.h>
#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <limits>
#include <mutex>
#include <set>
#include <utility>

#include "dcp/convert_output.h"
#include "dcp/key_patterns.h"
#include "dcp/patterns.h"
#include "dcp/tensor_source.h"
#include "support/ranks.h"

namespace {

bool listing_fails = false;                     // after the first entry
std::set<std::string>* synced_files = nullptr;  // and folders; where a test wants them

}  // namespace

// In front of those of the C library, also for the libraries that this program uses.
extern "C" __attribute__((visibility("default"))) dirent* readdir(DIR* folder) {
  static auto* const real = reinterpret_cast<dirent* (*)(DIR*)>(::dlsym(RTLD_NEXT, "readdir"));
  static DIR* gave_one = nullptr;
  if (listing_fails && std::exchange(gave_one, nullptr) == folder) {
    errno = EIO;
    return nullptr;
  }
  dirent* const entry = real(folder);
  if (listing_fails && entry && entry->d_name[0] != '.') gave_one = folder;
  return entry;
}
extern "C" __attribute__((visibility("default"))) int fsync(int file) {
  static auto* const real = reinterpret_cast<int (*)(int)>(::dlsym(RTLD_NEXT, "fsync"));
  static std::mutex mutex;  // a save has several threads
  if (synced_files) {
    const std::lock_guard guard(mutex);
    synced_files->insert(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(file)).string());
  }
  return real(file);
}

namespace fsdp2::dcp {
namespace {

namespace fs = std::filesystem;
using fsdp2::testing::TempDir;

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

TEST(Convert, StarsStandForAnyText) {
  const auto texts = [](const char* pattern, const char* key) {
    std::string out;
    const auto found = detail::match_texts(pattern, key);
    if (!found) return std::string("no");
    for (const auto& text : *found) out += "(" + std::string(text) + ")";
    return out;
  };
  EXPECT_EQ(texts("", ""), "");
  EXPECT_EQ(texts("", "a"), "no");
  EXPECT_EQ(texts("abc", "abc"), "");
  EXPECT_EQ(texts("abc", "abcd"), "no");
  EXPECT_EQ(texts("*", ""), "()");
  EXPECT_EQ(texts("model.*", "model.a.b"), "(a.b)");
  EXPECT_EQ(texts("model.*", "xmodel.a"), "no");
  EXPECT_EQ(texts("*.weight", "a.weight.weight"), "(a.weight)");
  EXPECT_EQ(texts("*.*.*", "a.b.c.d"), "(a)(b)(c.d)");
  EXPECT_EQ(texts("a*b*c", "aXbYbZc"), "(X)(YbZ)");
  EXPECT_EQ(texts("a*b*c", "aXbYbZcd"), "no");
  EXPECT_EQ(texts("**", "ab"), "()(ab)");
}

TEST(Convert, TheFirstRuleThatMatchesCounts) {
  detail::KeyRenamer renamer(std::vector<RenameRule>{{"a.*.b.*", "x.*.y.*"}, {"a.*", "*"}, {"/([0-9]+)$/", "n$1"}});
  EXPECT_EQ(renamer.rename("a.1.b.2"), "x.1.y.2");
  EXPECT_EQ(renamer.rename("a.3"), "3");
  EXPECT_EQ(renamer.rename("b.4.5"), "b.4.n5");
  EXPECT_EQ(renamer.rename("b"), std::nullopt);
  renamer.check_used();
  detail::KeyRenamer unused(std::vector<RenameRule>{{"a", "b"}});
  EXPECT_FSDP2_ERROR(unused.check_used(), kInvalidArgument, "the rule 'a' to 'b' matches no key");
}

TEST(Convert, RowsOfRanksAreThoseOfFullyShard) {
  const auto rows = [](std::vector<int64_t> sizes, int rank, int ranks) {
    const Chunk chunk = detail::rows_of_rank(sizes, rank, ranks);
    return std::vector<int64_t>{chunk.offsets.empty() ? 0 : chunk.offsets[0], chunk.sizes.empty() ? 1 : chunk.sizes[0]};
  };
  using Rows = std::vector<int64_t>;
  // 7 rows over 4 ranks: 2, 2, 2, 1. Over 5: 2, 2, 2, 1, none. As torch.chunk.
  EXPECT_EQ(rows({7, 3}, 0, 4), (Rows{0, 2}));
  EXPECT_EQ(rows({7, 3}, 3, 4), (Rows{6, 1}));
  EXPECT_EQ(rows({7, 3}, 3, 5), (Rows{6, 1}));
  EXPECT_EQ(rows({7, 3}, 4, 5), (Rows{7, 0}));
  EXPECT_EQ(rows({1}, 0, 3), (Rows{0, 1}));
  EXPECT_EQ(rows({1}, 2, 3), (Rows{1, 0}));
  EXPECT_EQ(rows({}, 0, 3), (Rows{0, 1}));
  EXPECT_EQ(rows({}, 1, 3), (Rows{0, 0}));
  EXPECT_EQ(rows({0, 3}, 0, 3), (Rows{0, 0}));
}

TEST(Convert, PiecesFollowEachOtherInRowMajorOrder) {
  // Every element once, in order, whatever the limit: also where a row, or a row of a row, is too big.
  const at::Tensor data = at::arange(2 * 3 * 5 * 4).reshape({2, 3, 5, 4});
  const Chunk box{{0, 1, 0, 1}, {2, 2, 5, 3}};
  const at::Tensor expected = data.narrow(1, 1, 2).narrow(3, 1, 3).contiguous().reshape({-1});
  for (const int64_t limit : {1, 8, 24, 56, 100, 240, 480, 100000}) {
    std::vector<at::Tensor> parts;
    int64_t biggest = 0;
    detail::for_each_piece(box, 8, limit, [&](const Chunk& piece) {
      at::Tensor part = data;
      for (size_t d = 0; d < 4; ++d) part = part.narrow(static_cast<int64_t>(d), piece.offsets[d], piece.sizes[d]);
      parts.push_back(part.contiguous().reshape({-1}));
      biggest = std::max(biggest, static_cast<int64_t>(part.numel() * 8));
    });
    EXPECT_TRUE(at::equal(at::cat(parts), expected)) << limit;
    EXPECT_LE(biggest, std::max<int64_t>(limit, 8)) << limit;
  }
  int calls = 0;
  detail::for_each_piece({{}, {}}, 8, 1, [&](const Chunk&) { ++calls; });
  EXPECT_EQ(calls, 1);
  detail::for_each_piece({{0, 0}, {3, 0}}, 8, 1, [&](const Chunk&) { ++calls; });
  EXPECT_EQ(calls, 1);
}

StateDict sample() {
  StateDict state;
  StateDict model;
  model["a"] = at::arange(12, at::kFloat).reshape({4, 3});
  model["b"] = at::tensor({1, 2, 3}, at::kLong);
  state["model"] = model;
  state["step"] = 5;
  state["pair"] = Value::tuple({Value(at::ones({2})), Value("x")});
  return state;
}

TEST(Convert, GoesRoundThroughEveryFormat) {
  TempDir dir;
  save(sample(), dir.path() + "/dcp");
  ConvertReport report = convert(dir.path() + "/dcp", dir.path() + "/state.pt");
  EXPECT_EQ(report.from, Format::Dcp);
  EXPECT_EQ(report.to, Format::TorchSave);
  EXPECT_EQ(report.tensors, 2u);
  EXPECT_EQ(report.values, 2u);
  EXPECT_EQ(report.bytes, 12u * 4 + 3u * 8);
  report = convert(dir.path() + "/state.pt", dir.path() + "/again", {.ranks = 2});
  EXPECT_EQ(report.files, (std::vector<std::string>{"__0_0.distcp", "__1_0.distcp"}));
  Reader reader(dir.path() + "/again");
  const StateDict again = reader.read_all();
  EXPECT_TRUE(at::equal(again.at("model").dict().at("a").tensor(), at::arange(12, at::kFloat).reshape({4, 3})));
  EXPECT_EQ(again.at("step").integer(), 5);
  EXPECT_TRUE(at::equal(again.at("pair").list()[0].tensor(), at::ones({2})));
  report = convert(dir.path() + "/again", dir.path() + "/hf", {.keys = {"model.*"}, .rename = {{"model.*", "*"}}});
  EXPECT_EQ(report.renamed, (std::vector<std::pair<std::string, std::string>>{{"model.a", "a"}, {"model.b", "b"}}));
  const CheckpointContents info = inspect(dir.path() + "/hf", {.values = true});
  ASSERT_EQ(info.items.size(), 2u);
  for (const ItemInfo& item : info.items) {
    EXPECT_EQ(item.dtype, item.key == "a" ? at::kFloat : at::kLong);
    ASSERT_TRUE(item.value.has_value());
    EXPECT_EQ(item.value->tensor().numel(), item.key == "a" ? 12 : 3);
  }
  report = convert(dir.path() + "/dcp", dir.path() + "/all.safetensors");
  EXPECT_EQ(report.left_out, (std::vector<std::string>{"step", "pair"}));
}

TEST(Convert, OfWhatIsReplacedNothingStays) {
  const TempDir dir;
  const fs::path source = dir.path() + "/dcp", out = dir.path() + "/out";
  save(sample(), source);
  size_t open_files = 0;
  for (int i = 0; i < 3; ++i) {
    convert(source, out, {.format = Format::Dcp, .overwrite = true, .ranks = i + 1});
    EXPECT_EQ(names_in(dir.path()), (std::set<std::string>{"dcp", "out"}));
    const size_t now = names_in("/proc/self/fd").size();
    if (i == 0) open_files = now;
    EXPECT_EQ(now, open_files) << "the lock on the place where it grew";
  }
  EXPECT_EQ(Reader(out).read("step").integer(), 5);
}

TEST(Convert, AFolderThatCannotBeListedIsAnError) {
  const TempDir dir;
  const fs::path checkpoint = dir.path() + "/dcp";
  const auto storage = local_storage();
  save(sample(), checkpoint);
  const std::string place = storage->begin(dir.path() + "/next", false);
  storage->create(place, "__0_0.distcp")->finish();
  listing_fails = true;
  EXPECT_FSDP2_ERROR(inspect(checkpoint), kIo, "Input/output error");
  EXPECT_FSDP2_ERROR(storage->list(checkpoint), kIo, "Input/output error");
  EXPECT_FSDP2_ERROR(storage->begin(checkpoint, true), kIo, "Input/output error");
  EXPECT_FSDP2_ERROR(storage->remove(checkpoint), kIo, "Input/output error");
  storage->clean(place, 0, 1);  // says nothing, and ends nothing
  listing_fails = false;
  EXPECT_EQ(inspect(checkpoint).items.size(), 4u);
}

TEST(Convert, WhyAPathCannotBeLookedAtIsSaid) {
  const TempDir dir;
  const fs::path source = dir.path() + "/dcp", circle = dir.path() + "/circle";
  const std::string long_name(300, 'x');
  save(sample(), source);
  fs::create_symlink("circle", circle);
  EXPECT_FSDP2_ERROR(inspect(circle), kIo, "Too many levels of symbolic links");
  EXPECT_FSDP2_ERROR(save(sample(), circle), kIo, "Too many levels of symbolic links");
  EXPECT_FSDP2_ERROR(convert(source, dir.path() + "/" + long_name), kIo, "File name too long");
  EXPECT_FSDP2_ERROR(convert(source, dir.path() + "/" + long_name + ".safetensors"), kIo, "File name too long");
}

/// A crash of the machine may take a folder whose name was never made durable, with all that is in it.
TEST(Convert, TheNamesOfAllFoldersThatWereMadeAreDurable) {
  const TempDir dir;
  const std::string top = fs::canonical(dir.path()).string();
  std::set<std::string> synced;
  synced_files = &synced;
  save(sample(), top + "/a/b/dcp");
  for (const char* folder : {"", "/a", "/a/b"}) EXPECT_TRUE(synced.count(top + folder)) << folder;
  synced.clear();
  convert(top + "/a/b/dcp", top + "/c/d/all.safetensors");
  for (const char* folder : {"", "/c", "/c/d"}) EXPECT_TRUE(synced.count(top + folder)) << folder;
  synced_files = nullptr;
}

TEST(Convert, ACastThatMakesValuesInfiniteIsAnError) {
  TempDir dir;
  const auto make = [&](const char* name, at::Tensor values) {
    StateDict state;
    state["w"] = values;
    save(state, dir.path() + "/" + name);
    return dir.path() + "/" + name;
  };
  const auto cast = [&](const std::string& source, at::ScalarType dtype) {
    convert(source, dir.path() + "/out", {.format = Format::Dcp, .overwrite = true, .dtype = dtype});
    return Reader(dir.path() + "/out").read("w").tensor();
  };
  const float infinity = std::numeric_limits<float>::infinity();
  const std::string big = make("big", at::tensor({65520.0f, 1.0f}));
  EXPECT_FSDP2_ERROR(cast(big, at::kHalf), kInvalidArgument, "'w' holds values that float16 cannot represent");
  EXPECT_FALSE(fs::exists(dir.path() + "/out"));
  EXPECT_EQ(cast(big, at::kBFloat16).scalar_type(), at::kBFloat16);
  // What was infinite before stays so.
  EXPECT_TRUE(at::equal(cast(make("inf", at::tensor({infinity, 1.5f})), at::kHalf),
                        at::tensor({infinity, 1.5f}).to(at::kHalf)));
  EXPECT_EQ(cast(make("step", at::tensor(300.5f).reshape({})), at::kBFloat16).scalar_type(), at::kFloat);
}

/// Between writing and checking, the result changes under our hands.
TEST(Convert, AResultThatChangedIsNotKept) {
  TempDir dir;
  save(sample(), dir.path() + "/dcp");
  const auto spoil = [&](bool cut) {
    bool done = false;
    return [&dir, cut, done](const ConvertProgress& progress) mutable {
      if (!progress.checking || std::exchange(done, true)) return;
      for (const auto& entry : fs::recursive_directory_iterator(dir.path())) {
        const std::string path = entry.path().string();
        if (path.find(".staging-") == std::string::npos || !path.ends_with("-of-00001.safetensors")) continue;
        std::string content = fsdp2::testing::read_file(path);
        // "b" comes first: its elements are bigger. The last bytes are those of "a".
        content.back() ^= 1;
        if (cut) content.resize(content.size() - 4);
        std::FILE* file = std::fopen(path.c_str(), "r+b");
        std::fwrite(content.data(), 1, content.size(), file);
        std::fclose(file);
        if (cut) fs::resize_file(path, content.size());
      }
    };
  };
  ConvertOptions options;
  options.progress = spoil(false);
  EXPECT_FSDP2_ERROR(convert(dir.path() + "/dcp", dir.path() + "/hf", options), kCorruption,
                     "'model.a' has other bytes");
  options.progress = spoil(true);
  EXPECT_FSDP2_ERROR(convert(dir.path() + "/dcp", dir.path() + "/hf", options), kCorruption, "");
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), fs::directory_iterator()), 1);
}

}  // namespace
}  // namespace fsdp2::dcp
