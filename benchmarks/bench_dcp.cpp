// Times checkpoints against raw files of the same bytes. Run it under `fsdp2 run`; run_dcp.py compares it with its
// Python twin, peer_dcp.py, which takes the same options and prints the same keys.
//
// Each round, all ranks at once, the time of the slowest rank:
//   raw_write   one file per rank: write in pieces of 64 MiB, fsync       save        dcp::save over the last
//   checkpoint raw_read    the same file into a warm buffer, from the page cache      load        dcp::load in place,
//   checksums compared
//                                                                          load_fast   the same without comparing
//   raw_copy    memcpy of the rank's tensors to a warm buffer              async_block until async_save returns
//                                                                          async_total until its future is done
// One JSON line at the end: medians in ms, and medians of the ratios within a round.

#include <fcntl.h>
#include <fsdp2/fsdp2.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <vector>

namespace {

namespace fs = std::filesystem;
namespace dcp = fsdp2::dcp;

struct Options {
  double mb = 1024;
  std::string folder = "bench_dcp.tmp";
  int rounds = 5;
  int64_t tensors = 0;   // of 8x8 each, in place of `mb`
  std::string metadata;  // of this folder: time to read, and nothing else
};

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app("Times dcp::save, load and async_save against raw files");
  app.add_option("--mb", options.mb, "size of the state over all ranks, in 10^6 bytes");
  app.add_option("--dir", options.folder, "a folder to make and to write to; removed in the end");
  app.add_option("--rounds", options.rounds, "how often everything is timed")->check(CLI::Range(1, 1000));
  app.add_option("--tensors", options.tensors, "this many tensors of 8x8 instead of big ones");
  app.add_option("--metadata", options.metadata, "only open the checkpoint in this folder, in one process");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return options;
}

/// fp32, sharded on dim 0 over all ranks: 1024x1024 each, or 8x8.
dcp::StateDict make_state(const Options& options, const fsdp2::DeviceMesh& mesh) {
  const int64_t side = options.tensors > 0 ? 8 : 1024;
  const int64_t count = options.tensors > 0
                            ? options.tensors
                            : std::max<int64_t>(1, std::llround(options.mb * 1e6 / (4.0 * double(side * side))));
  const int64_t ranks = mesh.size(), rows = (side + ranks - 1) / ranks;
  const int64_t begin = std::min(side, rows * mesh.get_local_rank(0)), mine = std::min(side, begin + rows) - begin;
  dcp::StateDict state;
  for (int64_t i = 0; i < count; ++i) {
    const torch::Tensor local = torch::rand({mine, side});
    state["layer" + std::to_string(i) + ".weight"] =
        fsdp2::from_local(local, mesh, {fsdp2::Shard{0}}, std::vector<int64_t>{side, side}).tensor();
  }
  return state;
}

void raw_write(const fs::path& path, const std::vector<char>& bytes) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t written = ::write(file, bytes.data() + done, std::min<size_t>(bytes.size() - done, 64u << 20));
    TORCH_CHECK(written > 0, "writing ", path.string(), ": ", std::strerror(errno));
    done += static_cast<size_t>(written);
  }
  TORCH_CHECK(::fsync(file) == 0 && ::close(file) == 0, "syncing ", path.string());
}

void raw_read(const fs::path& path, std::vector<char>& bytes) {
  const int file = ::open(path.c_str(), O_RDONLY);
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t got = ::read(file, bytes.data() + done, std::min<size_t>(bytes.size() - done, 64u << 20));
    TORCH_CHECK(got > 0, "reading ", path.string(), ": ", std::strerror(errno));
    done += static_cast<size_t>(got);
  }
  ::close(file);
}

double peak_mb() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1e3;
}

void time_metadata(const std::string& folder) {
  const double before = peak_mb();
  const auto start = std::chrono::steady_clock::now();
  const dcp::Reader reader(folder);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::cout << "{\"bench\": \"metadata\", \"keys\": " << reader.metadata().entries.size()
            << ", \"ms\": " << seconds.count() * 1e3 << ", \"rss_peak_mb\": " << peak_mb()
            << ", \"rss_before_mb\": " << before << "}" << std::endl;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

class Bench {
 public:
  explicit Bench(Options options)
      : options_(std::move(options)), mesh_(fsdp2::init_device_mesh(c10::kCPU, {fsdp2::get_world_size()})) {
    state_ = make_state(options_, mesh_);
    for (const auto& [key, value] : state_) locals_.push_back(fsdp2::DTensor(value.tensor()).to_local());
    for (const torch::Tensor& local : locals_) bytes_ += local.nbytes();
    raw_.assign(bytes_, 7);
    copy_.assign(bytes_, 1);
    // All of it is removed in the end, so it must be nobody's; made once all ranks have looked.
    TORCH_CHECK(!fs::exists(options_.folder), "--dir ", options_.folder,
                " exists, and would be removed in the end with all that is in it: name a folder that does not exist");
    fsdp2::barrier();
    fs::create_directories(options_.folder);
    fsdp2::barrier();
  }

  void run() {
    first_save_ = timed([&] { save(); });  // page faults, the first plan
    round();
    times_.clear();
    for (int i = 0; i < options_.rounds; ++i) round();
    report();
    fsdp2::barrier();
    if (fsdp2::get_rank() == 0) fs::remove_all(options_.folder);
  }

 private:
  fs::path path(const char* name) const { return fs::path(options_.folder) / name; }

  void save() { dcp::save(state_, path("ck"), {.overwrite = true}); }
  void load(bool verify) { dcp::load(state_, path("ck"), {.verify_checksums = verify}); }

  /// Seconds of the slowest rank.
  static double timed(const std::function<void()>& work) {
    fsdp2::barrier();
    const auto start = std::chrono::steady_clock::now();
    work();
    torch::Tensor seconds = torch::tensor(
        {std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()}, torch::kDouble);
    fsdp2::all_reduce(seconds, fsdp2::ReduceOp::MAX);
    return seconds.item<double>();
  }
  void note(const char* what, const std::function<void()>& work) { times_[what].push_back(timed(work)); }

  void round() {
    const fs::path raw = path(("raw" + std::to_string(fsdp2::get_rank())).c_str());
    note("raw_write", [&] { raw_write(raw, raw_); });
    note("save", [&] { save(); });
    note("raw_read", [&] { raw_read(raw, raw_); });
    note("load", [&] { load(true); });
    note("load_fast", [&] { load(false); });
    note("raw_copy", [&] {
      char* to = copy_.data();
      for (const torch::Tensor& local : locals_) {
        std::memcpy(to, local.const_data_ptr(), local.nbytes());
        to += local.nbytes();
      }
    });
    dcp::SaveFuture future;
    const auto start = std::chrono::steady_clock::now();
    note("async_block", [&] { future = dcp::async_save(state_, path("async"), {.overwrite = true}); });
    future.wait();
    torch::Tensor total = torch::tensor(
        {std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()}, torch::kDouble);
    fsdp2::all_reduce(total, fsdp2::ReduceOp::MAX);
    times_["async_total"].push_back(total.item<double>());
  }

  void report() {
    if (fsdp2::get_rank() != 0) return;
    const double total = static_cast<double>(bytes_) * fsdp2::get_world_size();
    const std::pair<const char*, const char*> ratios[] = {
        {"save", "raw_write"}, {"load", "raw_read"}, {"load_fast", "raw_read"}, {"async_block", "raw_copy"}};
    std::cout << "{\"bench\": \"dcp\", \"world\": " << fsdp2::get_world_size() << ", \"mb\": " << total / 1e6
              << ", \"tensors\": " << state_.size() << ", \"dir\": \"" << options_.folder << "\", \"ms\": {";
    std::string separator;
    for (const auto& [what, seconds] : times_) {
      std::cout << separator << "\"" << what << "\": " << median(seconds) * 1e3;
      separator = ", ";
    }
    std::cout << ", \"first_save\": " << first_save_ * 1e3 << "}, \"time_ratio\": {";
    separator.clear();
    for (const auto& [above, below] : ratios) {
      std::vector<double> values;
      for (size_t i = 0; i < times_[above].size(); ++i) values.push_back(times_[above][i] / times_[below][i]);
      std::cout << separator << "\"" << above << "/" << below << "\": " << median(values);
      separator = ", ";
    }
    std::cout << "}, \"rss_peak_mb\": " << peak_mb() << "}" << std::endl;
  }

  Options options_;
  fsdp2::DeviceMesh mesh_;
  dcp::StateDict state_;
  std::vector<torch::Tensor> locals_;
  size_t bytes_ = 0;  // of this rank
  std::vector<char> raw_, copy_;
  double first_save_ = 0;
  std::map<std::string, std::vector<double>> times_;
};

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  if (!options.metadata.empty()) {
    time_metadata(options.metadata);
    return 0;
  }
  fsdp2::init_process_group();
  Bench(options).run();
  fsdp2::destroy_process_group();
}
