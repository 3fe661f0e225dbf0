#include "run_options.h"

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <charconv>
#include <filesystem>

#include <fsdp2/error.h>

#include "edit_distance.h"
#include "signal_names.h"

namespace fsdp2::tool {
namespace {

/// torchrun options that mean something `fsdp2 run` does not do. Their torchrun default is
/// accepted.
struct Refused {
  const char* name;
  const char* harmless_value;  // nullptr: a flag
  const char* why;
};
constexpr Refused kRefused[] = {
    {"max-restarts", "0", "ranks are not restarted; start the job again, it resumes from its last checkpoint"},
    {"monitor-interval", "0.1", "the launcher learns of a rank's end at once, it does not poll; leave it out"},
    {"start-method", nullptr, "it is about Python functions as workers; leave it out"},
    {"event-log-handler", "null", "there are no event handlers; leave it out"},
    {"run-path", nullptr, "give the script as the program: fsdp2 run ... script.py"},
    {"duplicate-stdout-filters", "", "filter the file that --tee writes instead"},
    {"duplicate-stderr-filters", "", "filter the file that --tee writes instead"},
    {"local-addr", "", "with several nodes give --master-addr, the address of node 0"},
    {"logs-specs", "default", "it names a Python plug-in; use --log-dir, --tee and --redirects"},
    {"numa-binding", nullptr, "start the ranks under numactl instead"},
    {"virtual-local-rank", nullptr, "use LOCAL_RANK, or set CUDA_VISIBLE_DEVICES in the program"},
};

std::string underscored(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

std::string environment_name(const std::string& name) {
  std::string out = "PET_" + underscored(name);
  std::transform(out.begin(), out.end(), out.begin(), ::toupper);
  return out;
}

/// "--nproc-per-node,--nproc_per_node"
std::string spellings(const std::string& name, const std::string& short_name = "") {
  std::string out = (short_name.empty() ? "" : short_name + ",") + "--" + name;
  if (underscored(name) != name) out += ",--" + underscored(name);
  return out;
}

template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::string::size_type begin = 0;
  while (begin <= text.size()) {
    auto end = std::min(text.find(separator, begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

int num_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

int num_gpus() {
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return 0;
  return c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->deviceCount();
}

int count_local_ranks(const std::string& text) {
  if (text == "cpu") return num_cpus();
  if (text == "auto") return num_gpus() > 0 ? num_gpus() : num_cpus();
  if (text == "gpu") {
    FSDP2_CHECK(num_gpus() > 0, kInvalidArgument,
                "[run] --nproc-per-node gpu: this libtorch sees no GPU; give a number, auto or cpu");
    return num_gpus();
  }
  auto count = number<int>(text);
  FSDP2_CHECK(count && *count >= 1, kInvalidArgument, "[run] --nproc-per-node: got '", text,
              "'; allowed are a number from 1 on, auto, cpu, gpu");
  return *count;
}

int count_nodes(const std::string& text) {
  auto parts = split(text, ':');
  if (parts.size() == 2 && parts[0] == parts[1]) parts.pop_back();  // "2:2" is torchrun's way to say 2
  FSDP2_CHECK(parts.size() != 2, kUnsupported, "[run] --nnodes ", text,
              ": a range of nodes needs restarts, which are not offered; give one number");
  auto count = parts.size() == 1 ? number<int>(parts[0]) : std::nullopt;
  FSDP2_CHECK(count && *count >= 1, kInvalidArgument, "[run] --nnodes: got '", text,
              "'; allowed is a number from 1 on");
  return *count;
}

/// "3" for every rank, or "0:1,1:2" per local rank.
std::vector<StreamChoice> parse_streams(const std::string& option, const std::string& text, int num_ranks) {
  std::vector<StreamChoice> out(num_ranks);
  auto parse_one = [&](const std::string& value) {
    auto bits = number<int>(value);
    FSDP2_CHECK(bits && *bits >= 0 && *bits <= 3, kInvalidArgument, "[run] --", option, ": got '", text,
                "'; allowed are 0 (none), 1 (stdout), 2 (stderr), 3 (both), or local rank:value pairs "
                "such as 0:3,1:2");
    return StreamChoice{(*bits & 1) != 0, (*bits & 2) != 0};
  };
  if (text.find(':') == std::string::npos) {
    std::fill(out.begin(), out.end(), parse_one(text));
    return out;
  }
  for (const auto& pair : split(text, ',')) {
    auto parts = split(pair, ':');
    auto local_rank = number<int>(parts.at(0));
    FSDP2_CHECK(parts.size() == 2 && local_rank && *local_rank >= 0 && *local_rank < num_ranks, kInvalidArgument,
                "[run] --", option, ": '", pair, "' is not a local rank below ", num_ranks, ", a colon and 0 to 3");
    out[*local_rank] = parse_one(parts[1]);
  }
  return out;
}

std::string find_on_path(const std::string& name) {
  if (name.find('/') != std::string::npos) return access(name.c_str(), X_OK) == 0 ? name : "";
  const char* path = getenv("PATH");
  for (const auto& folder : split(path ? path : "/usr/local/bin:/usr/bin:/bin", ':')) {
    auto candidate = folder + "/" + name;
    if (access(candidate.c_str(), X_OK) == 0 && !std::filesystem::is_directory(candidate)) return candidate;
  }
  return "";
}

std::string python() {
  if (const char* chosen = getenv("PYTHON_EXEC"); chosen && *chosen) return chosen;
  for (const char* name : {"python", "python3"}) {
    if (auto found = find_on_path(name); !found.empty()) return found;
  }
  FSDP2_THROW(kNotFound, "[run] no python on PATH for a .py program; activate an environment or set PYTHON_EXEC");
}

std::vector<std::string> resolve_program(std::vector<std::string> words, bool as_module, bool no_python) {
  const std::string& program = words.front();
  FSDP2_CHECK(!(as_module && no_python), kInvalidArgument,
              "[run] -m and --no-python exclude each other; leave one out");
  std::vector<std::string> command;
  if (as_module) {
    command = {python(), "-u", "-m"};
  } else if (!no_python && program.ends_with(".py")) {
    FSDP2_CHECK(access(program.c_str(), R_OK) == 0, kNotFound, "[run] cannot read the script ", program,
                "; check the path (this folder: ", std::filesystem::current_path().string(), ")");
    command = {python(), "-u"};
  } else {
    auto found = find_on_path(program);
    if (found.empty() || std::filesystem::is_directory(found)) {
      bool exists = std::filesystem::is_regular_file(program);
      FSDP2_THROW(kNotFound, "[run] cannot execute the program ", program, ": ",
                  exists ? "the file is not executable; chmod +x it, or name its interpreter first "
                           "(fsdp2 run ... bash script.sh)"
                         : "no such file, nor a program of that name on PATH; check the path");
    }
    words.front() = found;
  }
  command.insert(command.end(), words.begin(), words.end());
  return command;
}

/// CLI11's help, with a usage line that shows where the program goes.
class HelpText : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: fsdp2 run [options] --nproc-per-node N program [arguments of the program]...\n";
  }
};

}  // namespace

struct RunCommandLine::Raw {
  bool standalone = false, module = false, no_python = false, no_prefix = false, dry_run = false;
  std::string num_nodes = "1", num_local_ranks = "1", node_rank = "0", master_addr, master_port;
  std::string rdzv_backend, rdzv_endpoint, rdzv_id, rdzv_conf, role = "default", log_dir;
  std::string redirects = "0", tee = "0", local_ranks_filter, signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";
  std::string shutdown_timeout;
  std::map<std::string, std::string> refused_values;
  std::map<std::string, CLI::Option*> refused;
};

RunCommandLine::RunCommandLine(CLI::App& program) : raw_(std::make_unique<Raw>()) {
  app_ = program.add_subcommand("run",
                                "Start a program as N cooperating processes (ranks), with "
                                "torchrun's options and environment.");
  app_->formatter(std::make_shared<HelpText>());
  app_->prefix_command();
  app_->footer(
      "Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the rest of "
      "torchrun's\n"
      "environment. A .py program runs through the python on PATH, anything else is executed as it "
      "is.\n"
      "Local rank 0 keeps the standard input. When a rank fails, the others are stopped and the "
      "exit code is\n"
      "that rank's (128 + signal number for a signal). Nothing that the ranks started is left "
      "behind.\n"
      "Every option may also come from PET_<NAME> in the environment, e.g. "
      "PET_NPROC_PER_NODE=2.\n\n"
      "Examples:\n"
      "  fsdp2 run --nproc-per-node 4 ./train --steps 100\n"
      "  fsdp2 run --nnodes 2 --node-rank 1 --master-addr node0 --nproc-per-node 8 ./train\n"
      "  fsdp2 run --nproc-per-node 2 --dry-run ./train      # shows each rank's environment");

  auto text = [&](const std::string& name, std::string& value, const std::string& help,
                  const std::string& short_name = "") {
    app_->add_option(spellings(name, short_name), value, help)->envname(environment_name(name));
  };
  auto flag = [&](const std::string& name, bool& value, const std::string& help, const std::string& short_name = "") {
    app_->add_flag(spellings(name, short_name), value, help);
    if (const char* set = getenv(environment_name(name).c_str())) value = *set && std::string(set) != "0";
  };
  flag("standalone", raw_->standalone, "one node, free port (the default with one node)");
  text("nproc-per-node", raw_->num_local_ranks, "ranks on this machine: a number, auto, cpu or gpu (1)");
  text("nnodes", raw_->num_nodes, "machines in the job (1)");
  text("node-rank", raw_->node_rank, "index of this machine; 0 hosts the store (0)");
  text("master-addr", raw_->master_addr, "address of node 0, needed with several nodes");
  text("master-port", raw_->master_port, "port on node 0 (one node: a free port; several: 29500)");
  text("rdzv-backend", raw_->rdzv_backend, "static, or c10d with one node");
  text("rdzv-endpoint", raw_->rdzv_endpoint, "one node: localhost:PORT, 0 for a free port");
  text("rdzv-id", raw_->rdzv_id, "TORCHELASTIC_RUN_ID of the ranks (a fresh unique id)");
  text("rdzv-conf", raw_->rdzv_conf, "only join_timeout=SECONDS, how long to wait for the other nodes (600)");
  text("role", raw_->role, "ROLE_NAME of the ranks (default)");
  flag("module", raw_->module, "the program is a Python module, as in python -m", "-m");
  flag("no-python", raw_->no_python, "execute the program itself, even a .py file");
  text("log-dir", raw_->log_dir, "folder for the files of --redirects and --tee, and error files");
  text("redirects", raw_->redirects, "streams that go to files only: 0, 1 stdout, 2 stderr, 3 both, or 0:1,1:3", "-r");
  text("tee", raw_->tee, "streams that go to files and to the console, same form", "-t");
  text("local-ranks-filter", raw_->local_ranks_filter, "show only these local ranks, e.g. 0,2");
  flag("no-prefix", raw_->no_prefix, "do not put [rank N] before each line");
  text("signals-to-handle", raw_->signals, "signals forwarded to the ranks (SIGTERM,SIGINT,SIGHUP,SIGQUIT)");
  text("shutdown-timeout", raw_->shutdown_timeout, "seconds between asking ranks to end and SIGKILL (3)");
  flag("dry-run", raw_->dry_run, "print each rank's command and environment, start nothing");
  for (const auto& option : kRefused) {
    auto* added = app_->add_option(spellings(option.name), raw_->refused_values[option.name])
                      ->group("")
                      ->expected(0, 1)
                      ->envname(environment_name(option.name));
    raw_->refused[option.name] = added;
  }
}

RunCommandLine::~RunCommandLine() = default;

bool RunCommandLine::chosen() const { return app_->parsed(); }

RunOptions RunCommandLine::finish() const {
  const Raw& raw = *raw_;
  RunOptions out;
  for (const auto& option : kRefused) {
    if (raw.refused.at(option.name)->count() == 0) continue;
    if (option.harmless_value && raw.refused_values.at(option.name) == option.harmless_value) continue;
    FSDP2_THROW(kUnsupported, "[run] --", option.name,
                " is an option of torchrun that fsdp2 run does not offer: ", option.why);
  }
  auto words = app_->remaining();
  if (!words.empty() && words.front() == "--") words.erase(words.begin());
  FSDP2_CHECK(!words.empty(), kInvalidArgument,
              "[run] no program to start; write it after the options: fsdp2 run --nproc-per-node 2 "
              "./train");
  if (words.front().starts_with("-")) {
    auto given = words.front().substr(0, words.front().find('='));
    std::string nearest;
    size_t best = 4;
    for (const auto* option : app_->get_options()) {
      for (const auto& name : option->get_lnames()) {
        auto distance = edit_distance(underscored(given), "__" + underscored(name));
        if (distance < best) best = distance, nearest = "--" + name;
      }
    }
    FSDP2_THROW(kInvalidArgument, "[run] unknown option ", given,
                nearest.empty() ? "." : "; did you mean " + nearest + "?",
                " Options stand before the program, its own arguments after it; fsdp2 run --help "
                "lists them");
  }

  out.num_local_ranks = count_local_ranks(raw.num_local_ranks);
  out.num_nodes = count_nodes(raw.num_nodes);
  auto node_rank = number<int>(raw.node_rank);
  FSDP2_CHECK(node_rank && *node_rank >= 0 && *node_rank < out.num_nodes, kInvalidArgument, "[run] --node-rank: got '",
              raw.node_rank, "'; with --nnodes ", out.num_nodes, " it is 0 to ", out.num_nodes - 1);
  out.node_rank = *node_rank;
  FSDP2_CHECK(!raw.standalone || out.num_nodes == 1, kInvalidArgument,
              "[run] --standalone means one node, --nnodes says ", out.num_nodes, "; leave one out");

  // With one node this launcher hosts the store, whatever the backend is called.
  std::string port = raw.master_port;
  if (!raw.standalone) {
    FSDP2_CHECK(
        raw.rdzv_backend.empty() || raw.rdzv_backend == "static" || (raw.rdzv_backend == "c10d" && out.num_nodes == 1),
        kUnsupported, "[run] --rdzv-backend ", raw.rdzv_backend, " is not offered",
        out.num_nodes > 1 ? " with several nodes" : "",
        "; use --node-rank, --master-addr and --master-port (backend static)");
    if (!raw.rdzv_endpoint.empty()) {
      auto colon = raw.rdzv_endpoint.rfind(':');
      auto host = raw.rdzv_endpoint.substr(0, colon);
      FSDP2_CHECK(out.num_nodes == 1 && (host == "localhost" || host == "127.0.0.1"), kUnsupported,
                  "[run] --rdzv-endpoint ", raw.rdzv_endpoint,
                  " is not offered; one node: localhost:PORT; several: --master-addr and --master-port");
      FSDP2_CHECK(port.empty(), kInvalidArgument,
                  "[run] --rdzv-endpoint and --master-port both name a port; leave one out");
      if (colon != std::string::npos) port = raw.rdzv_endpoint.substr(colon + 1);
    }
  }
  if (out.num_nodes > 1) {
    FSDP2_CHECK(!raw.master_addr.empty(), kInvalidArgument, "[run] --nnodes ", out.num_nodes,
                " needs --master-addr, the address of node 0 as the other nodes see it");
    if (port.empty()) port = "29500";
  }
  if (!raw.master_addr.empty() && !raw.standalone) out.master_addr = raw.master_addr;
  auto port_number = port.empty() || raw.standalone ? std::optional<int>(0) : number<int>(port);
  FSDP2_CHECK(port_number && *port_number >= 0 && *port_number <= 65535, kInvalidArgument, "[run] port: got '", port,
              "'; allowed is 0 (a free one) to 65535");
  FSDP2_CHECK(out.num_nodes == 1 || *port_number > 0, kInvalidArgument,
              "[run] --master-port 0 with several nodes: they could not find it; give a free port "
              "of node 0");
  out.master_port = *port_number;
  if (!raw.standalone) out.run_id = raw.rdzv_id;
  for (const auto& item : split(raw.rdzv_conf, ',')) {
    auto seconds = item.starts_with("join_timeout=") ? number<double>(std::string_view(item).substr(13)) : std::nullopt;
    FSDP2_CHECK(seconds && *seconds > 0, kUnsupported, "[run] --rdzv-conf ", item,
                " is not offered; allowed is join_timeout=SECONDS");
    out.join_timeout = *seconds;
  }

  out.role = raw.role;
  out.log_dir = raw.log_dir;
  out.redirects = parse_streams("redirects", raw.redirects, out.num_local_ranks);
  out.tee = parse_streams("tee", raw.tee, out.num_local_ranks);
  for (int i = 0; i < out.num_local_ranks; ++i) {
    bool files = out.redirects[i].out || out.redirects[i].err || out.tee[i].out || out.tee[i].err;
    FSDP2_CHECK(!files || !out.log_dir.empty(), kInvalidArgument,
                "[run] --redirects and --tee write files: say where with --log-dir FOLDER");
    if (raw.local_ranks_filter.empty()) out.shown_local_ranks.insert(i);
  }
  for (const auto& item : split(raw.local_ranks_filter, ',')) {
    auto local_rank = number<int>(item);
    FSDP2_CHECK(local_rank && *local_rank >= 0 && *local_rank < out.num_local_ranks, kInvalidArgument,
                "[run] --local-ranks-filter: '", item, "' is not a local rank below ", out.num_local_ranks);
    out.shown_local_ranks.insert(*local_rank);
  }
  out.prefix = !raw.no_prefix;
  out.dry_run = raw.dry_run;
  for (const auto& name : split(raw.signals, ',')) {
    int signal_number = signal_from_name(name);
    FSDP2_CHECK(signal_number > 0 && signal_number != SIGKILL && signal_number != SIGSTOP && signal_number != SIGCHLD,
                kInvalidArgument, "[run] --signals-to-handle: '", name,
                "' cannot be handled; give names such as SIGTERM,SIGINT,SIGUSR1");
    out.signals.push_back(signal_number);
  }
  std::string timeout = raw.shutdown_timeout;
  if (const char* set = getenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"); set && timeout.empty()) timeout = set;
  if (!timeout.empty()) {
    auto seconds = number<double>(timeout);
    FSDP2_CHECK(seconds && *seconds >= 0, kInvalidArgument, "[run] --shutdown-timeout: got '", timeout,
                "'; allowed is a number of seconds from 0 on");
    out.shutdown_timeout = *seconds;
  }
  out.command = resolve_program(std::move(words), raw.module, raw.no_python);
  return out;
}

}  // namespace fsdp2::tool
