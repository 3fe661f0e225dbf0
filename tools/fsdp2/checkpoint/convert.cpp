#include <fsdp2/dcp/convert.h>
#include <fsdp2/error.h>

#include <fstream>
#include <iostream>
#include <memory>

#include "checkpoint/command.h"
#include "checkpoint/json.h"
#include "checkpoint/progress.h"
#include "checkpoint/text.h"

namespace fsdp2::tool {
namespace {

struct Options {
  std::string source, destination, to, dtype, rename_file;
  std::vector<std::string> rename, tied;
  bool json = false, no_checksums = false;
  dcp::ConvertOptions convert;
};

/// "FROM=TO"; the "=" of an expression between slashes is the one after the second slash.
std::pair<std::string, std::string> split(const std::string& option, const std::string& text) {
  size_t equals = text.find('=');
  if (text.starts_with("/")) {
    const size_t slash = text.rfind("/=");
    equals = slash == std::string::npos || slash == 0 ? std::string::npos : slash + 1;
  }
  FSDP2_CHECK(equals != std::string::npos && equals > 0, kInvalidArgument, "[checkpoint] ", option, ": got '", text,
              "'; it is written FROM=TO, such as 'model.*=*' or '/^h[.]/=layers.'");
  return {text.substr(0, equals), text.substr(equals + 1)};
}

void read_rules(const std::string& path, std::vector<dcp::RenameRule>& rules) {
  std::ifstream file(path);
  FSDP2_CHECK(file, kNotFound, "[checkpoint] cannot read ", path, ", the file of rules for new names");
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty() || line[0] == '#') continue;
    const auto [from, to] = split(path, line);
    rules.push_back({from, to});
  }
}

void finish(Options& options) {
  dcp::ConvertOptions& out = options.convert;
  if (!options.to.empty()) {
    out.format = options.to == "dcp"     ? dcp::Format::Dcp
                 : options.to == "torch" ? dcp::Format::TorchSave
                                         : dcp::Format::Safetensors;
  }
  if (!options.dtype.empty()) {
    const std::string prefix = "torch.";
    const bool long_form = options.dtype.starts_with(prefix);
    out.dtype = dcp::parse_dtype(long_form ? options.dtype.substr(prefix.size()) : options.dtype);
    FSDP2_CHECK(out.dtype, kInvalidArgument, "[checkpoint] --dtype: there is no dtype '", options.dtype,
                "'; write it as torch does: bfloat16, float16, float32, ...");
  }
  for (const std::string& text : options.rename) {
    const auto [from, to] = split("--rename", text);
    out.rename.push_back({from, to});
  }
  if (!options.rename_file.empty()) read_rules(options.rename_file, out.rename);
  for (const std::string& text : options.tied) out.tied.push_back(split("--tied", text));
  out.verify_checksums = !options.no_checksums;
}

Json pairs_json(const std::vector<std::pair<std::string, std::string>>& pairs) {
  Json list = Json::array();
  for (const auto& [first, second] : pairs) list.push_back({first, second});
  return list;
}

void show_json(const Options& options, const dcp::ConvertReport& report) {
  print_json({{"source", options.source},
              {"destination", options.destination},
              {"from", dcp::to_string(report.from)},
              {"to", dcp::to_string(report.to)},
              {"tensors", report.tensors},
              {"values", report.values},
              {"bytes", report.bytes},
              {"files", report.files},
              {"renamed", pairs_json(report.renamed)},
              {"cast", report.cast},
              {"left_out", report.left_out},
              {"tied", pairs_json(report.tied)},
              {"equal", report.equal}});
}

std::vector<std::string> joined(const std::vector<std::pair<std::string, std::string>>& pairs, const char* between) {
  std::vector<std::string> out;
  for (const auto& [first, second] : pairs) out.push_back(first + between + second);
  return out;
}

void show_text(const Options& options, const dcp::ConvertReport& report) {
  std::cout << options.destination << ": " << dcp::to_string(report.to) << " with "
            << count_text(report.tensors, "tensor") << " of " << bytes_text(report.bytes) << ", "
            << count_text(report.values, "value") << ", " << count_text(report.files.size(), "file")
            << "; read back and equal\n";
  if (!report.renamed.empty())
    std::cout << "renamed " << count_text(report.renamed.size(), "key") << ": "
              << list_text(joined(report.renamed, " -> "), 3) << '\n';
  if (!report.cast.empty())
    std::cout << "cast to " << options.dtype << ": " << count_text(report.cast.size(), "tensor") << '\n';
  if (!report.left_out.empty())
    std::cout << "left out, safetensors hold no plain values: " << list_text(report.left_out) << '\n';
  if (!report.tied.empty()) {
    std::cout << (report.to == dcp::Format::Safetensors ? "tied, written once: " : "tied, written under both names: ")
              << list_text(joined(report.tied, " = ")) << '\n';
  }
  if (report.from == report.to) return;
  for (const auto& names : report.equal)
    std::cout << "equal bytes (say --tied if they are one weight): " << list_text(names) << '\n';
}

int run(Options& options) {
  finish(options);
  dcp::ConvertReport report;
  {
    Progress progress;
    options.convert.progress = [&](const dcp::ConvertProgress& at) {
      progress.update(at.checking ? "checking" : "writing", at.done, at.total);
    };
    report = dcp::convert(options.source, options.destination, options.convert);
  }
  options.json ? show_json(options, report) : show_text(options, report);
  return 0;
}

/// Options that both subcommands have.
CLI::App* add_common(CLI::App& parent, const char* name, const char* help, Options& options) {
  CLI::App* app = parent.add_subcommand(name, help);
  app->add_option("SOURCE", options.source, "a checkpoint folder or file")->required();
  app->add_option("DESTINATION", options.destination, "what to write; must not be there")->required();
  app->add_option("--keys", options.convert.keys, "only keys that match this pattern (* is any text); may be repeated")
      ->allow_extra_args(false);
  app->add_flag("--overwrite", options.convert.overwrite,
                "replace the destination; it stays whole until the new one is complete");
  app->add_flag("--no-checksums", options.no_checksums, "do not compare the checksums of the source");
  app->add_flag("--json", options.json, "print JSON");
  return app;
}

}  // namespace

CheckpointCommand::Subcommand add_convert(CLI::App& parent) {
  auto options = std::make_shared<Options>();
  CLI::App* app = add_common(parent, "convert", "Write a checkpoint in another format, piece by piece.", *options);
  app->add_option("--to", options->to,
                  "dcp, safetensors or torch; else the name of the destination decides (.safetensors, .pt), or it is "
                  "the other one of DCP and safetensors")
      ->check(CLI::IsMember({"dcp", "safetensors", "torch"}));
  app->add_option("--rename", options->rename,
                  "FROM=TO: a new name for keys, may be repeated, the first that matches counts. FROM is a pattern "
                  "whose * come back in TO ('model.*=*'), or a regular expression between slashes "
                  "('/^h[.]([0-9]+)/=layers.$1')")
      ->allow_extra_args(false);
  app->add_option("--rename-file", options->rename_file, "a file with one FROM=TO on each line; # begins a comment");
  app->add_option("--tied", options->tied,
                  "A=B: weight A is weight B (names in the destination): left out of safetensors, made elsewhere where "
                  "it is missing, compared where both are there; may be repeated")
      ->allow_extra_args(false);
  app->add_option("--dtype", options->dtype,
                  "convert floating-point tensors, except those without dimensions: float32, float16, bfloat16, ...");
  app->add_option("--cast", options->convert.cast,
                  "with --dtype: only tensors whose key (in the source) matches this pattern; may be repeated")
      ->allow_extra_args(false);
  app->add_option("--ranks", options->convert.ranks, "DCP: cut every tensor for so many ranks (1)");
  app->add_option("--max-file-size", options->convert.max_file_bytes,
                  "safetensors: begin a new file after so many bytes, e.g. 500MB, 2GiB (5GB)")
      ->transform(CLI::AsSizeValue(true));
  app->footer("The result is read back and compared before it gets its name.");
  return {app, [options] { return run(*options); }};
}

CheckpointCommand::Subcommand add_reshard(CLI::App& parent) {
  auto options = std::make_shared<Options>();
  CLI::App* app = add_common(parent, "reshard",
                             "Write a DCP checkpoint as another number of ranks would: one file a rank, each with the "
                             "rows that fully_shard gives it.",
                             *options);
  app->add_option("--ranks", options->convert.ranks, "number of ranks")->required();
  options->convert.format = dcp::Format::Dcp;
  return {app, [options] { return run(*options); }};
}

}  // namespace fsdp2::tool
