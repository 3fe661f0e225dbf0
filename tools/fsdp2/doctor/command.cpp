#include "doctor/command.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>

#include <fsdp2/error.h>
#include <fsdp2/version.h>

#include "checkpoint/text.h"
#include "doctor/collective_worker.h"

namespace fsdp2::tool {
namespace {

struct Part {
  const char* name;
  void (*check)(const DoctorOptions& options, Topic& topic);
};
constexpr Part kParts[] = {
    {"libtorch", check_libtorch},
    {"devices", check_devices},
    {"backends", check_backends},
    {"network", check_network},
    {"shared_memory", check_shared_memory},
    {"limits", check_limits},
    {"environment", check_environment},
    {"collectives", check_collectives},
    {"folder", check_folder},
};

/// A bar over the parts, where stderr is a terminal.
class Bar {
 public:
  ~Bar() {
    if (terminal_) std::fputs("\r\033[K", stderr);
  }
  void show(size_t done, const char* name) const {
    if (!terminal_) return;
    std::string bar(done * 3, '#');
    bar.resize(std::size(kParts) * 3, '.');
    std::fprintf(stderr, "\r\033[K[%s] %s", bar.c_str(), name);
    std::fflush(stderr);
  }

 private:
  bool terminal_ = isatty(STDERR_FILENO) == 1;
};

std::vector<Topic> examine(const DoctorOptions& options) {
  std::vector<Topic> topics;
  const Bar bar;
  for (const Part& part : kParts) {
    bar.show(topics.size(), part.name);
    Topic& topic = topics.emplace_back(part.name);
    const std::string fix =
        "the rest of the report stands without it; mend what the text says and run fsdp2 doctor again";
    try {
      part.check(options, topic);
    } catch (const Error& error) {
      topic.find(Severity::kWarning, "part-failed", std::string("stopped: ") + error.what_without_backtrace(), fix);
    } catch (const std::exception& error) {
      topic.find(Severity::kWarning, "part-failed", std::string("stopped: ") + error.what(), fix);
    }
  }
  return topics;
}

std::string version() { return c10::str(FSDP2_VERSION_MAJOR, ".", FSDP2_VERSION_MINOR, ".", FSDP2_VERSION_PATCH); }

void show_json(const DoctorOptions& options, const std::vector<Topic>& topics, const Diagnosis& diagnosis) {
  Json out = {{"fsdp2", version()}, {"ranks", options.num_ranks}};
  for (const Topic& topic : topics) out[topic.name()] = topic.facts();
  out.update(Json::parse(diagnosis.to_json()));
  print_json(out);
}

void show_text(const DoctorOptions& options, const std::vector<Topic>& topics, const Diagnosis& diagnosis) {
  Table table;
  table.row(
      {"fsdp2", version(), "for " + count_text(static_cast<size_t>(options.num_ranks), "rank") + " on this machine"});
  for (const Topic& topic : topics) {
    std::string name = topic.name();
    for (const auto& [label, text] : topic.rows()) {
      table.row({name, label, printable(text)});
      name.clear();
    }
  }
  std::cout << table.text() << '\n';
  for (const Finding& finding : diagnosis) {
    std::cout << to_string(finding.severity) << "  " << finding.rule << "  " << finding.where << "\n  what  "
              << finding.what << "\n  fix   " << finding.fix << '\n';
  }
  std::cout << "fsdp2 doctor: " << (diagnosis.empty() ? "nothing found" : count_text(diagnosis.size(), "finding"))
            << '\n';
}

}  // namespace

DoctorCommand::DoctorCommand(CLI::App& program) {
  app_ = program.add_subcommand("doctor",
                                "Look at this machine: what a training job finds here, and what is wrong with it.");
  app_->add_option("--nproc,--nproc-per-node", options_.num_ranks, "ranks that are to run on this machine (2)")
      ->check(CLI::Range(1, 1024));
  app_->add_option("--folder", options_.folder, "where checkpoints are to go; its speed is measured (.)");
  app_->add_flag("--quick,--no-benchmarks", quick_, "measure nothing: no processes are started, nothing is written");
  app_->add_flag("--json", json_, "print JSON");
  app_->add_flag("--worker", worker_, "a rank of the measurement")->group("");
  app_->footer(
      "Shows libtorch, processors, memory, GPUs, backends, network interfaces, shared memory, limits of files and\n"
      "processes, and the variables that matter; runs collectives over N processes as fsdp2 run starts them; and\n"
      "writes 64 MiB to the folder. All of it takes a few seconds and needs neither a network nor root. A finding "
      "says\n"
      "what was seen and how to mend it: error (a job will not run), warning (it will run badly, or not everywhere),\n"
      "note (good to know).\n\n"
      "Examples:\n"
      "  fsdp2 doctor --nproc 8 --folder /mnt/checkpoints\n"
      "  fsdp2 doctor --quick --json          # for a script that prepares machines\n"
      "  srun --ntasks-per-node 1 fsdp2 doctor --nproc 8   # once on every machine of a job\n\n"
      "Exit codes: 0 no errors, 1 a finding is an error, 2 the call makes no sense.");
}

int DoctorCommand::run() const {
  if (worker_) return measure_collectives();
  signal(SIGXFSZ, SIG_IGN);  // what a limit of file sizes refuses is to be an error code
  DoctorOptions options = options_;
  options.benchmarks = !quick_;
  const std::vector<Topic> topics = examine(options);
  Diagnosis diagnosis;
  for (const Severity severity : {Severity::kError, Severity::kWarning, Severity::kNote}) {
    for (const Topic& topic : topics) {
      for (const Finding& finding : topic.findings()) {
        if (finding.severity == severity) diagnosis.findings.push_back(finding);
      }
    }
  }
  json_ ? show_json(options, topics, diagnosis) : show_text(options, topics, diagnosis);
  return !diagnosis.empty() && diagnosis.begin()->severity == Severity::kError ? 1 : 0;
}

}  // namespace fsdp2::tool
