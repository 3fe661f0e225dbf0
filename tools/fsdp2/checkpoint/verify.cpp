#include <fsdp2/dcp/dcp.h>

#include <iostream>
#include <memory>

#include "checkpoint/command.h"
#include "checkpoint/json.h"
#include "checkpoint/progress.h"
#include "checkpoint/text.h"

namespace fsdp2::tool {
namespace {

struct Options {
  std::string path;
  bool json = false;
};

void show_json(const Options& options, const dcp::VerifyReport& report) {
  Json faults = Json::array();
  for (const dcp::Fault& fault : report.faults)
    faults.push_back({{"file", fault.file}, {"key", fault.key}, {"offset", fault.offset}, {"text", fault.text}});
  print_json({{"path", options.path},
              {"ok", report.ok()},
              {"files", report.files},
              {"items", report.items},
              {"bytes", report.bytes},
              {"checksums", report.has_checksums},
              {"faults", std::move(faults)},
              {"unreferenced", report.unreferenced}});
}

void show_text(const Options& options, const dcp::VerifyReport& report) {
  std::cout << options.path << ": " << count_text(report.files, "file") << ", " << count_text(report.items, "item")
            << ", " << bytes_text(report.bytes)
            << " read: " << (report.ok() ? "no faults" : count_text(report.faults.size(), "fault")) << '\n';
  if (!report.has_checksums)
    std::cout << "there is no .checksums file: only the CRC-32 of the records inside of items were compared\n";
  for (const dcp::Fault& fault : report.faults) {
    std::cout << printable(fault.file) << ", offset " << fault.offset;
    if (!fault.key.empty()) std::cout << ", key " << printable(fault.key);
    std::cout << ": " << printable(fault.text) << '\n';
  }
  if (!report.unreferenced.empty())
    std::cout << "not part of the checkpoint: " << list_text(report.unreferenced, 20) << '\n';
}

}  // namespace

CheckpointCommand::Subcommand add_verify(CLI::App& parent) {
  auto options = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand(
      "verify", "Read a whole DCP checkpoint and compare it with its checksums; exit code 1 where it is damaged.");
  app->add_option("PATH", options->path, "a checkpoint folder")->required();
  app->add_flag("--json", options->json, "print JSON");
  return {app, [options] {
            dcp::VerifyReport report;
            {
              Progress progress;
              report = dcp::verify(options->path, {},
                                   [&](uint64_t done, uint64_t total) { progress.update("reading", done, total); });
            }
            options->json ? show_json(*options, report) : show_text(*options, report);
            return report.ok() ? 0 : 1;
          }};
}

}  // namespace fsdp2::tool
