// Runs what the pages of skills/ show, on every rank:
//   skill_program fragments    each C++ fragment, in order, with a fresh model
//   skill_program faults FILE  programs with one fault each; rank 0 writes what they say, one a line
//   skill_program peak BACKEND bytes of whole parameters at once, as one group and with a group per block
//   skill_program alone PORT   a rank whose peer never comes

#define main reference_main
#include "reference/train.cpp"
#undef main

#include <filesystem>
#include <fstream>
#include <functional>

#include "docs/skill_faults.h"

struct Fragment {
  const char* page;
  int line;
  bool joins;  // calls init_process_group() itself
  void (*run)(Net&, torch::optim::AdamW&, torch::Tensor, torch::Tensor);
};
#include "skill_fragments.inc"

namespace {

/// Most bytes of whole parameters at once in a step of the reference program's model.
int64_t peak_bytes(bool one_group) {
  Net net(kInputs, 128, 4);
  if (!one_group) {
    for (auto& block : net->blocks) fsdp2::fully_shard(block);
  }
  fsdp2::fully_shard(net);
  fsdp2::reset_counters();
  net(torch::ones({2, kInputs})).sum().backward();
  return fsdp2::counters().unsharded_bytes_peak;
}

/// What a single-process program left behind.
void write_old_files(const std::filesystem::path& folder) {
  Net net(kInputs, 128, 4);
  torch::optim::AdamW optimizer(net->parameters(), 1e-3);
  net(torch::ones({2, kInputs})).sum().backward();
  optimizer.step();
  torch::save(net, folder / "old.pt");
  torch::save(optimizer, folder / "old_optimizer.pt");
}

void run_fragments() {
  for (const Fragment& fragment : kFragments) {
    // Fragments of one page build on each other's files.
    const auto folder = std::filesystem::path("pages") / std::filesystem::path(fragment.page).stem();
    std::filesystem::create_directories(folder);
    if (fsdp2::get_rank() == 0 && !std::filesystem::exists(folder / "old.pt")) write_old_files(folder);
    fsdp2::barrier();
    const auto home = std::filesystem::current_path();
    std::filesystem::current_path(folder);
    if (fragment.joins) {
      fsdp2::destroy_process_group();
      Net net(kInputs, 16, 1);
      torch::optim::AdamW optimizer(net->parameters());
      fragment.run(net, optimizer, torch::ones({8, kInputs}), torch::ones({8, 1}));
      if (!fsdp2::is_initialized()) fsdp2::init_process_group();
    } else {
      Net net = build_model_meta();
      auto optimizer = build_optimizer(net);
      const auto [x, y] = next_batch(1);
      try {
        fragment.run(net, optimizer, x, y);
      } catch (const c10::Error& error) {
        std::cerr << fragment.page << ':' << fragment.line << ": " << error.what_without_backtrace() << std::endl;
        throw;
      }
    }
    std::filesystem::current_path(home);
    fsdp2::barrier();
    if (fsdp2::get_rank() == 0) std::cout << "ran " << fragment.page << ':' << fragment.line << std::endl;
  }
}

void run_faults(const std::string& path) {
  std::ofstream out(fsdp2::get_rank() == 0 ? path : "/dev/null");
  for (const faults::Fault& fault : faults::all()) {
    try {
      fault.run();
      out << fault.name << ": no error" << std::endl;
    } catch (const c10::Error& error) {
      out << error.what_without_backtrace() << std::endl;
    }
    fsdp2::barrier();
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "alone") {
    fsdp2::init_process_group({.init_method = std::string("tcp://127.0.0.1:") + argv[2],
                               .timeout = std::chrono::seconds(1),
                               .rank = 0,
                               .world_size = 2});
    return 0;
  }
  fsdp2::init_process_group({.backend = what == "peak" ? argv[2] : ""});
  if (what == "peak") {
    const int64_t one_group = peak_bytes(true), group_per_block = peak_bytes(false);
    if (fsdp2::get_rank() == 0) std::cout << "peaks " << one_group << ' ' << group_per_block << std::endl;
  }
  if (what == "fragments") run_fragments();
  if (what == "faults") run_faults(argv[2]);
  fsdp2::destroy_process_group();
} catch (const c10::Error& error) {
  std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  return 1;
}
