// fsdp2: the command-line program of libfsdp2.

#include <CLI/CLI.hpp>

#include <exception>
#include <iostream>
#include <string>

#include <fsdp2/error.h>
#include <fsdp2/version.h>

#include "checkpoint/command.h"
#include "doctor/command.h"
#include "run.h"
#include "run_options.h"

int main(int argc, char** argv) {  // NOLINT(bugprone-exception-escape): setting the options up cannot fail
  CLI::App program("Training over several processes with libfsdp2.", "fsdp2");
  program.set_version_flag("--version", std::to_string(FSDP2_VERSION_MAJOR) + "." +
                                            std::to_string(FSDP2_VERSION_MINOR) + "." +
                                            std::to_string(FSDP2_VERSION_PATCH));
  program.require_subcommand(1);
  program.failure_message([](const CLI::App*, const CLI::Error& error) {
    return std::string("fsdp2: ") + error.what() + "; --help after a subcommand lists what there is\n";
  });
  fsdp2::tool::RunCommandLine run(program);
  fsdp2::tool::CheckpointCommand checkpoint(program);
  fsdp2::tool::DoctorCommand doctor(program);
  try {
    const std::string first = argc > 1 ? argv[1] : "";
    if (!first.empty() && first[0] != '-' && first != "run" && first != "checkpoint" && first != "doctor") {
      FSDP2_THROW(kInvalidArgument, "unknown subcommand ", first,
                  "; there are: run, checkpoint, doctor. See fsdp2 --help");
    }
    if (argc > 2 && first == "checkpoint" && argv[2][0] != '-') checkpoint.check_name(argv[2]);
    program.parse(argc, argv);
    if (checkpoint.chosen()) return checkpoint.run();
    if (doctor.chosen()) return doctor.run();
    return fsdp2::tool::run(run.finish(), argv);
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? 0 : 2;
  } catch (const fsdp2::Error& error) {
    std::cerr << "fsdp2: " << error.what_without_backtrace() << '\n';
    return error.code() == fsdp2::ErrorCode::kInvalidArgument || error.code() == fsdp2::ErrorCode::kUnsupported ? 2
           : error.code() == fsdp2::ErrorCode::kNotFound && run.chosen()                                        ? 127
                                                                                                                : 1;
  } catch (const std::exception& error) {
    std::cerr << "fsdp2: " << error.what() << '\n';
    return 1;
  }
}
