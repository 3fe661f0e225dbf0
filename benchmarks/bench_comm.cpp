// Times collectives through c10d::ProcessGroup against memcpy of the same bytes on every rank at once.
// peer_comm.py is the Python twin.
//
//   OMP_NUM_THREADS=1 fsdp2 run --nproc-per-node 2 bench_comm --backend shm --sizes 1e3,1e5,1e7
//
// BYTES is the whole buffer: an all-gather's input is BYTES/N a rank, a reduce-scatter's output too. A size's
// operations take turns, in reverse order every other round. A round repeats an operation without a pause, so that no
// rank sleeps; its time is that of the slowest rank, over the repeats. Medians over quiet rounds, in microseconds:
//   ag, rs, ar        all-gather, reduce-scatter (SUM), all-reduce (SUM), fp32
//   *_bf16            the same bytes of bf16
//   barrier           the group's barrier
//   memcpy            BYTES, on every rank at once

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "quiet.h"
#include "torch_compat.h"

namespace {

using bench::Json;

struct Options {
  std::vector<double> sizes{1e3, 1e4, 1e5, 1e6, 1e7, 1e8};
  int rounds = 15;
  double max_wait = 90;
  bool pin = false;
  std::string backend, tag;
};

struct Operation {
  std::string name;
  std::function<void()> run;
  int repeats = 1;
  std::vector<double> seconds{};
};

/// The buffers of one dtype.
struct Buffers {
  at::Tensor whole, part, reduced;

  Buffers(int64_t bytes, int ranks, at::ScalarType dtype) {
    const auto count = bytes / static_cast<int64_t>(c10::elementSize(dtype));
    whole = torch::zeros({count}, dtype);
    part = torch::zeros({count / ranks}, dtype);
    reduced = torch::zeros({count}, dtype);
  }
};

void all_gather(const fsdp2::ProcessGroup& group, Buffers& b) {
  fsdp2::detail::c10d_all_gather(*group, b.whole, b.part)->wait();
}
void reduce_scatter(const fsdp2::ProcessGroup& group, Buffers& b) {
  fsdp2::detail::c10d_reduce_scatter(*group, b.part, b.reduced, {})->wait();
}
void all_reduce(const fsdp2::ProcessGroup& group, Buffers& b) {
  std::vector<at::Tensor> tensors{b.reduced};
  group->allreduce(tensors)->wait();
}

void expect(const at::Tensor& values, double expected, const char* what) {
  FSDP2_CHECK((values == expected).all().item<bool>(), kCorruption, "[bench] ", what, " gave ",
              values[0].item<double>(), "; expected ", expected);
}

/// One operation of each kind on known values: what is timed is also right.
void check(const fsdp2::ProcessGroup& group, Buffers& b, int rank, int ranks) {
  const double sum = ranks * (ranks + 1) / 2.0;
  b.part.fill_(rank + 1);
  all_gather(group, b);
  for (int i = 0; i < ranks; ++i) expect(b.whole.view({ranks, -1})[i], i + 1, "all-gather");
  b.reduced.fill_(rank + 1);
  reduce_scatter(group, b);
  expect(b.part, sum, "reduce-scatter");
  all_reduce(group, b);
  expect(b.reduced, sum, "all-reduce");
  for (at::Tensor* tensor : {&b.whole, &b.part, &b.reduced}) tensor->zero_();  // sums of zeros stay as they are
}

void bench_size(const Options& o, double size, int wanted) {
  const auto& group = fsdp2::default_group();
  const int rank = fsdp2::get_rank(), ranks = fsdp2::get_world_size();
  const int64_t unit = 64 * ranks, bytes = std::max<int64_t>(unit, static_cast<int64_t>(size) / unit * unit);
  Buffers fp32(bytes, ranks, torch::kFloat32), bf16(bytes, ranks, torch::kBFloat16);
  check(group, fp32, rank, ranks);
  check(group, bf16, rank, ranks);
  const at::Tensor copy = torch::empty({bytes}, torch::kByte).fill_(1);
  const at::Tensor source = torch::empty({bytes}, torch::kByte).fill_(2);
  std::vector<Operation> operations{
      {"ag", [&] { all_gather(group, fp32); }},
      {"rs", [&] { reduce_scatter(group, fp32); }},
      {"ar", [&] { all_reduce(group, fp32); }},
      {"ag_bf16", [&] { all_gather(group, bf16); }},
      {"rs_bf16", [&] { reduce_scatter(group, bf16); }},
      {"ar_bf16", [&] { all_reduce(group, bf16); }},
      {"barrier", [&] { group->barrier()->wait(); }},
      {"memcpy", [&] { std::memcpy(copy.mutable_data_ptr(), source.const_data_ptr(), static_cast<size_t>(bytes)); }},
  };
  const bool sockets = o.backend.find("gloo") != std::string::npos;
  for (Operation& operation : operations) {
    const bool slow = sockets && operation.name != "memcpy";
    operation.repeats = std::clamp(static_cast<int>((slow ? 3e6 : 1e7) / double(bytes)), 1, slow ? 50 : 200);
  }
  const auto time_one = [&](Operation& operation) {
    fsdp2::barrier();
    operation.run();  // the ranks leave a barrier one after another
    const double start = bench::now();
    for (int i = 0; i < operation.repeats; ++i) operation.run();
    operation.seconds.push_back((bench::now() - start) / operation.repeats);
  };
  const auto round = [&](int index) {
    for (size_t i = 0; i < operations.size(); ++i) {
      time_one(operations[index % 2 == 0 ? i : operations.size() - 1 - i]);
    }
  };
  round(0);
  for (Operation& operation : operations) operation.seconds.clear();
  bench::Quiet quiet(wanted, {.max_factor = 2, .wait_seconds = o.max_wait});
  const std::vector<int> kept = quiet.run(round);
  Json mine;
  for (const Operation& operation : operations) mine[operation.name] = operation.seconds;
  const std::vector<Json> everyone = bench::gather(mine);
  if (rank != 0) return;
  std::map<std::string, std::vector<double>> slowest;
  Json us, spread, rate;
  for (const Operation& operation : operations) {
    std::vector<double>& values = slowest[operation.name];
    for (const int i : kept) {
      double most = 0;
      for (const Json& one : everyone) most = std::max(most, one[operation.name][i].get<double>());
      values.push_back(most * 1e6);
    }
    us[operation.name] = bench::median(values);
    spread[operation.name] = {bench::quantile(values, 0.1), bench::quantile(values, 0.9)};
    if (operation.name != "barrier") rate[operation.name] = double(bytes) / bench::median(values) / 1e3;
  }
  Json ratio;
  for (const char* name : {"ag", "rs", "ar", "ag_bf16", "rs_bf16", "ar_bf16"}) {
    ratio[std::string(name) + "/memcpy"] = bench::median(bench::ratios(slowest[name], slowest["memcpy"]));
  }
  bench::print_line(bench::rounded({{"bench", "comm"},
                                    {"tag", o.tag},
                                    {"backend", o.backend},
                                    {"world", ranks},
                                    {"bytes", bytes},
                                    {"us", us},
                                    {"us_p10_p90", spread},
                                    {"ratio", ratio},
                                    {"gb_s", rate},
                                    {"noise", quiet.noise()}}));
}

void run(const Options& o) {
  bench::limit_threads();
  fsdp2::init_process_group({.backend = o.backend});
  if (o.pin) bench::pin_to_core(fsdp2::get_local_rank());
  for (const double size : o.sizes) bench_size(o, size, std::max(4, size < 5e7 ? o.rounds : o.rounds / 3));
  fsdp2::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Times collectives against memcpy of the same bytes");
  app.option_defaults()->always_capture_default();
  app.add_option("--sizes", o.sizes, "of the whole buffer, in bytes")->delimiter(',');
  app.add_option("--rounds", o.rounds, "rounds to keep; a third of it for 5e7 bytes and more")
      ->check(CLI::PositiveNumber);
  app.add_flag("--pin", o.pin, "rank r on core r modulo the cores");
  app.add_option("--backend", o.backend, "of the process group; empty: the library's choice");
  app.add_option("--tag", o.tag, "repeated in the JSON lines");
  app.add_option("--max-wait", o.max_wait, "seconds to wait for a quiet machine, all waits together");
  return bench::run_main(app, argc, argv, [&] { run(o); });
}
