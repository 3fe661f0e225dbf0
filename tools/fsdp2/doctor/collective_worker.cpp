#include "doctor/collective_worker.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fsdp2/process_group.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>

#include <fsdp2/error.h>

#include "checkpoint/json.h"

namespace fsdp2::tool {
namespace {

constexpr double kSecondsEach = 0.15;
constexpr int64_t kElements = int64_t{4} << 20;  // of float32: 16 MiB, the whole weights of a block
constexpr auto kTimeout = std::chrono::seconds(20);

double seconds_of(int64_t times, const std::function<void()>& collective) {
  barrier();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < times; ++i) collective();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / static_cast<double>(times);
}

/// Of one call, on the average of as many as fit into kSecondsEach.
double seconds_per_call(const std::function<void()>& collective) {
  collective();  // the first one connects, and touches its memory
  const double first = seconds_of(2, collective);
  Tensor times = at::tensor(static_cast<int64_t>(std::clamp(kSecondsEach / first, 2.0, 2000.0)));
  broadcast(times, 0);  // all ranks the same
  return seconds_of(times.item<int64_t>(), collective);
}

Json measure() {
  const int64_t part = std::max<int64_t>(1, kElements / get_world_size());
  Tensor whole = at::zeros({part * get_world_size()}), shard = at::zeros({part}), one = at::zeros({1});
  const double gigabytes = static_cast<double>(whole.nbytes()) / 1e9;
  Json out;
  out["latency_us"] = 1e6 * seconds_per_call([&] { all_reduce(one); });
  out["all_gather_gb_s"] = gigabytes / seconds_per_call([&] { all_gather_into_tensor(whole, shard); });
  out["reduce_scatter_gb_s"] = gigabytes / seconds_per_call([&] { reduce_scatter_tensor(shard, whole); });
  return out;
}

}  // namespace

int measure_collectives() {
  const char* rank = std::getenv("RANK");
  FSDP2_CHECK(rank != nullptr, kUsage, "[doctor] --worker is for ranks that fsdp2 doctor starts; leave it out");
  const bool speaks = std::string(rank) == "0";
  for (const char* backend : {"shm", "gloo"}) {
    Json line = {{"backend", backend}};
    try {
      init_process_group({.backend = std::string("cpu:") + backend, .timeout = kTimeout});
    } catch (const Error& error) {  // on all ranks together
      line["error"] = error.what_without_backtrace();
      if (speaks) std::cout << line.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl;
      continue;
    }
    line.update(measure());
    destroy_process_group();
    if (speaks) std::cout << line.dump() << std::endl;
  }
  return 0;
}

}  // namespace fsdp2::tool
