#pragma once

// Finds and ends every process of a run, wherever it moved to.

#include <sys/types.h>

#include <set>
#include <string>
#include <vector>

namespace fsdp2::tool {

/// Holds the ids of the runs that a process belongs to, outermost first, separated by ':'. Unlike
/// TORCHELASTIC_RUN_ID it is unique even when --rdzv-id is given, and a run inside a run keeps
/// both.
inline constexpr const char* kRunChainVariable = "FSDP2_RUN_CHAIN";

/// A new id: letters and digits, different on every call and host.
std::string make_unique_id();

/// Processes, zombies excluded, that carry `unique_id` in their environment, and those adopted by
/// `adopter` (orphans of its ranks), except `spared`.
std::vector<pid_t> find_run_processes(const std::string& unique_id, pid_t adopter, const std::set<pid_t>& spared);

/// SIGKILLs what find_run_processes finds until nothing is left; false when some outlived
/// `seconds`.
bool kill_run_processes(const std::string& unique_id, pid_t adopter, const std::set<pid_t>& spared, double seconds);

/// A process outside the launcher's session that waits for the launcher's end, however sudden, then
/// kills the run's processes and removes `scratch_folder`. Start it before any thread exists.
class Watchdog {
 public:
  /// `program_args` is main's argv: the child renames itself there, so that a kill by name of the
  /// launcher does not take its watchdog along.
  Watchdog(const std::string& unique_id, const std::string& scratch_folder, char** program_args);
  /// Lets the watchdog finish and waits for it.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  int alive_fd_ = -1;  // closed by the kernel when the launcher dies
};

}  // namespace fsdp2::tool
