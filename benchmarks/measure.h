#pragma once

// What every benchmark needs: statistics, this process's time and memory, JSON lines.

#include <CLI/CLI.hpp>

#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

namespace bench {

using Json = nlohmann::ordered_json;

/// Linear between the two nearest values; NaN for none.
double quantile(std::vector<double> values, double q);
double median(std::vector<double> values);
/// Medians of numerators[i] / denominators[i] and the like.
std::vector<double> ratios(const std::vector<double>& numerators, const std::vector<double>& denominators);

/// The same with every floating-point number, also inside, rounded to that many significant digits.
Json rounded(const Json& value, int digits = 4);
/// One line on standard output.
void print_line(const Json& record);

/// Monotonic, in seconds.
double now();
/// CPU seconds of this process, user and system.
double own_cpu_seconds();

/// Of this process, in MiB.
struct Memory {
  double resident = 0;
  double peak_resident = 0;  // since the start, or since forget_peak_resident()
};
Memory memory();
void forget_peak_resident();
/// Resident memory with each page divided by the number of processes that share it. Takes milliseconds.
double proportional_memory();

/// This process on core `local_rank` modulo the cores it may use, with the threads that it starts later.
void pin_to_core(int local_rank);
/// OMP_NUM_THREADS, or one: ranks share the machine.
void limit_threads();

/// Every rank's value, by rank. Collective.
std::vector<Json> gather(const Json& mine);

/// Parses the flags and runs `body`, which may throw. Returns what main should.
int run_main(CLI::App& app, int argc, char** argv, const std::function<void()>& body);

}  // namespace bench
