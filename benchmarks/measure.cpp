#include "measure.h"

#include <fsdp2/fsdp2.h>
#include <sched.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <limits>
#include <string>

namespace bench {

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::sort(values.begin(), values.end());
  const double position = q * static_cast<double>(values.size() - 1);
  const auto low = static_cast<size_t>(position);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (values[high] - values[low]) * (position - static_cast<double>(low));
}

double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

std::vector<double> ratios(const std::vector<double>& numerators, const std::vector<double>& denominators) {
  std::vector<double> result(numerators.size());
  for (size_t i = 0; i < result.size(); ++i) result[i] = numerators[i] / denominators[i];
  return result;
}

Json rounded(const Json& value, int digits) {
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (!std::isfinite(number)) return nullptr;
    char text[40];
    std::snprintf(text, sizeof(text), "%.*g", digits, number);
    return std::strtod(text, nullptr);
  }
  Json result = value;
  if (value.is_structured()) {
    for (Json& item : result) item = rounded(item, digits);
  }
  return result;
}

void print_line(const Json& record) { std::cout << record.dump() << std::endl; }

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double own_cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * double(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

namespace {

/// Number behind "key:" in a file of such lines, which /proc gives in KiB, in MiB.
double mib_of(const char* file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(key + ":")) return std::strtod(line.c_str() + key.size() + 1, nullptr) / 1024;
  }
  FSDP2_THROW(kIo, "[bench] ", file, " has no line ", key);
}

}  // namespace

Memory memory() { return {mib_of("/proc/self/status", "VmRSS"), mib_of("/proc/self/status", "VmHWM")}; }

void forget_peak_resident() { std::ofstream("/proc/self/clear_refs") << "5"; }

double proportional_memory() { return mib_of("/proc/self/smaps_rollup", "Pss"); }

void pin_to_core(int local_rank) {
  cpu_set_t allowed, chosen;
  CPU_ZERO(&allowed);
  CPU_ZERO(&chosen);
  ::sched_getaffinity(0, sizeof(allowed), &allowed);
  int place = local_rank % CPU_COUNT(&allowed);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed) && place-- == 0) CPU_SET(core, &chosen);
  }
  ::sched_setaffinity(0, sizeof(chosen), &chosen);
}

void limit_threads() {
  const char* wanted = std::getenv("OMP_NUM_THREADS");
  torch::set_num_threads(wanted != nullptr ? std::max(1, std::atoi(wanted)) : 1);
}

std::vector<Json> gather(const Json& mine) {
  std::vector<Json> everyone;
  for (const std::string& text : fsdp2::all_gather_strings(mine.dump())) everyone.push_back(Json::parse(text));
  return everyone;
}

int run_main(CLI::App& app, int argc, char** argv, const std::function<void()>& body) {
  CLI11_PARSE(app, argc, argv);
  try {
    body();
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
  }
  return 1;
}

}  // namespace bench
