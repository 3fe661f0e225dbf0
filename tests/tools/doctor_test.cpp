// labels: peer
// needs: programs
// The program `fsdp2 doctor` as a process: its facts against the system's, its findings against faults that are made.

#include <gtest/gtest.h>

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <regex>
#include <set>
#include <thread>

#include <nlohmann/json.hpp>

#include "launcher/launch.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Words = std::vector<std::string>;

// An environment in which there is nothing to find.
const Words kSound = {"OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo"};
constexpr const char* kNoUnshare = "no user namespaces here";

/// The words before the program, e.g. of `env` or `sh -c`, are run as they are.
ProcessResult doctor(const Words& arguments, const Words& environment = {}, const Words& before = {}) {
  Words words = {"env"};
  for (const char* name : {"FSDP2_TEST_BACKEND", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR",
                           "MASTER_PORT", "GLOO_SOCKET_IFNAME"}) {
    words.insert(words.end(), {"-u", name});
  }
  words.insert(words.end(), environment.begin(), environment.end());
  words.insert(words.end(), before.begin(), before.end());
  words.insert(words.end(), {fsdp2_program(), "doctor"});
  words.insert(words.end(), arguments.begin(), arguments.end());
  return run_process(words);
}

/// A report as JSON; the exit code has to agree with it.
json report(Words arguments, const Words& environment = kSound, const Words& before = {}) {
  arguments.push_back("--json");
  const ProcessResult result = doctor(arguments, environment, before);
  // libgomp says something of its own about some values of OMP_NUM_THREADS.
  const size_t begin = std::min(result.output.find("{\n"), result.output.size());
  const json out = json::parse(result.output.substr(begin), nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(out.is_object()) << result.output;
  if (!out.is_object()) return json::object({{"findings", json::array()}});
  EXPECT_EQ(result.exit_code, out["errors"] > 0 ? 1 : 0) << result.output;
  return out;
}

/// The finding of that rule; null where there is none.
json finding(const json& of, const std::string& rule) {
  for (const json& each : of["findings"]) {
    if (each["rule"] == rule) return each;
  }
  return nullptr;
}

Words words_in_shell(const std::string& command) { return {"bash", "-c", command + " exec \"$@\"", "bash"}; }

TEST(Doctor, FactsAreThoseOfTheSystem) {
  const ProcessResult python = run_python(test_file("tools/doctor_peer.py"), {"facts"});
  ASSERT_EQ(python.exit_code, 0) << python.output;
  const json expected = json::parse(python.output);
  const json seen = report({"--quick"});

  const json& libtorch = seen["libtorch"];
  for (const char* key : {"version", "cuda", "gloo", "nccl", "cxx11_abi", "cpu_capability"}) {
    EXPECT_EQ(libtorch[key], expected[key]) << key;
  }
  EXPECT_EQ(fs::path(libtorch["library"].get<std::string>()).parent_path(),
            expected["library_folder"].get<std::string>());
  EXPECT_EQ(libtorch["built_with"], expected["version"]);

  const json& devices = seen["devices"];
  for (const char* key : {"cores_online", "cores_affinity", "memory_total"})
    EXPECT_EQ(devices[key], expected[key]) << key;
  EXPECT_EQ(devices["gpus_usable"], expected["gpus"]);
  EXPECT_LE(devices["cores_usable"], devices["cores_affinity"]);
  EXPECT_EQ(seen["backends"]["nccl"].get<bool>(), expected["nccl"].get<bool>() && expected["gpus"] > 0);
  EXPECT_EQ(seen["shared_memory"]["dev_shm"]["total"], expected["dev_shm_total"]);

  for (const char* key : {"open_files", "processes", "locked_memory"}) {
    const json& limit = seen["limits"][key];
    const auto value = [](const json& number) { return number.is_null() ? int64_t{-1} : number.get<int64_t>(); };
    EXPECT_EQ(value(limit["soft"]), expected[key][0].get<int64_t>()) << key;
    EXPECT_EQ(value(limit["hard"]), expected[key][1].get<int64_t>()) << key;
  }

  const json& network = seen["network"];
  EXPECT_EQ(network["host_name"], expected["host_name"]);
  const auto addresses = network["host_addresses"].get<std::set<std::string>>();
  EXPECT_EQ(addresses, expected["host_addresses"].get<std::set<std::string>>());
  std::vector<std::string> names;
  for (const json& each : network["interfaces"]) names.push_back(each["name"]);
  EXPECT_EQ(names, expected["interfaces"].get<std::vector<std::string>>());
}

TEST(Doctor, MeasuresRanksAndTheFolder) {
  const TempDir folder;
  const json seen = report({"--folder", folder.path()});
  EXPECT_EQ(seen["errors"], 0) << seen;
  for (const char* backend : {"shm", "gloo"}) {
    for (const char* key : {"latency_us", "all_gather_gb_s", "reduce_scatter_gb_s"}) {
      EXPECT_GT(seen["collectives"][backend].value(key, 0.0), 0) << seen;
    }
  }
  for (const char* key : {"write_bytes_per_s", "read_bytes_per_s", "fsync_s"})
    EXPECT_GT(seen["folder"].value(key, 0.0), 0);
  EXPECT_EQ(seen["folder"]["path"], fs::canonical(folder.path()).string());
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(Doctor, TableSaysTheSameAsJson) {
  const json seen = report({"--quick"}, {"FSDP2_DEBUGG=1", "RANK=0"});
  const ProcessResult table = doctor({"--quick"}, {"FSDP2_DEBUGG=1", "RANK=0"});
  EXPECT_EQ(table.exit_code, 1);
  ASSERT_GE(seen["findings"].size(), 2u);
  for (const json& each : seen["findings"]) {
    for (const char* key : {"rule", "severity", "what", "fix", "where"}) {
      EXPECT_NE(table.output.find(each[key].get<std::string>()), std::string::npos) << table.output;
    }
  }
  EXPECT_EQ(seen["findings"][0]["severity"], "error");  // those first
  for (const std::string& fact : {seen["libtorch"]["version"].get<std::string>(), std::string("FSDP2_DEBUGG"),
                                  seen["network"]["host_name"].get<std::string>()}) {
    EXPECT_NE(table.output.find(fact), std::string::npos) << table.output;
  }
  EXPECT_EQ(table.output.find('\r'), std::string::npos) << "progress where there is no terminal";
}

TEST(Doctor, ShowsProgressOnATerminal) {
  const ProcessResult shown =
      run_python(test_file("tools/doctor_peer.py"), {"terminal", fsdp2_program(), "doctor", "--quick"});
  EXPECT_NE(shown.output.find("] libtorch"), std::string::npos) << shown.output;
  EXPECT_NE(shown.output.find("] folder"), std::string::npos) << shown.output;
  EXPECT_TRUE(shown.output.ends_with("\r\033[K")) << shown.output;  // and leaves nothing on it
}

struct Fault {
  std::string rule, severity;
  Words environment, mended;  // beside kSound, or in place of its entries
  std::string text;           // of the finding
};

TEST(Doctor, FindsFaultsInTheEnvironment) {
  const int cores = report({"--quick"})["devices"]["cores_usable"];
  const Words launched = {"RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29500", "LOCAL_RANK=1"};
  const auto with = [&](const std::string& entry) {
    Words out = launched;
    out.push_back(entry);  // env takes the last of two
    return out;
  };
  const std::vector<Fault> faults = {
      {"unknown-variable",
       "warning",
       {"FSDP2_SHM_INPLACE=1"},
       {"FSDP2_SHM_IN_PLACE=1"},
       "did you mean FSDP2_SHM_IN_PLACE?"},
      {"launch-variables", "error", {"RANK=0"}, launched, "RANK set without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"},
      {"launch-variables", "error", with("RANK=2"), launched, "RANK=2 with WORLD_SIZE=2"},
      {"launch-variables", "error", with("WORLD_SIZE=two"), launched, "WORLD_SIZE=two"},
      {"launch-variables", "error", with("MASTER_PORT=70000"), launched, "MASTER_PORT=70000"},
      {"local-rank", "warning", with("LOCAL_RANK="), launched, "without LOCAL_RANK"},
      {"master-addr", "error", {"MASTER_ADDR=no-such-host.invalid"}, launched, "no-such-host.invalid"},
      {"gloo-interface",
       "error",
       {"GLOO_SOCKET_IFNAME=nosuch0"},
       {"GLOO_SOCKET_IFNAME=lo"},
       "nosuch0, which does not exist"},
      {"omp-threads", "note", {"OMP_NUM_THREADS="}, {"OMP_NUM_THREADS=1"}, "OMP_NUM_THREADS is not set"},
      {"omp-threads", "warning", {"OMP_NUM_THREADS=many"}, {"OMP_NUM_THREADS=1"}, "OMP_NUM_THREADS=many"},
      {"omp-threads",
       "warning",
       {"OMP_NUM_THREADS=" + std::to_string(cores + 1)},
       {"OMP_NUM_THREADS=1"},
       "times 2 ranks"},
      {"setting", "note", {"FSDP2_DEBUG=0"}, {"FSDP2_DEBUG=1"}, "FSDP2_DEBUG=0: ranks do not compare"},
  };
  Words all_mended = kSound;
  for (const Fault& fault : faults) {
    SCOPED_TRACE(fault.text);
    Words environment = kSound;
    environment.insert(environment.end(), fault.environment.begin(), fault.environment.end());
    all_mended.insert(all_mended.end(), fault.mended.begin(), fault.mended.end());
    const json found = finding(report({"--quick"}, environment), fault.rule);
    ASSERT_FALSE(found.is_null());
    EXPECT_EQ(found["severity"], fault.severity);
    EXPECT_NE(found.dump().find(fault.text), std::string::npos) << found;
    EXPECT_FALSE(found["fix"].get<std::string>().empty());
  }
  const json sound = report({"--quick"}, all_mended);
  for (const Fault& fault : faults)
    EXPECT_TRUE(finding(sound, fault.rule).is_null()) << fault.rule << sound["findings"];
}

// A variable that the library learns to read must not be called a mistake.
TEST(Doctor, KnowsEveryVariableThatIsRead) {
  Words environment = kSound;
  const std::regex read("getenv\\(\"(FSDP2_[A-Z0-9_]+)\"");
  for (const char* folder : {"../src", "../tools", "../include"}) {
    for (const auto& entry : fs::recursive_directory_iterator(test_file(folder))) {
      if (!entry.is_regular_file()) continue;
      const std::string text = read_file(entry.path().string());
      for (std::sregex_iterator match(text.begin(), text.end(), read), end; match != end; ++match) {
        environment.push_back((*match)[1].str() + "=x");
      }
    }
  }
  ASSERT_GE(environment.size(), kSound.size() + 5);
  const json seen = report({"--quick"}, environment);
  EXPECT_TRUE(finding(seen, "unknown-variable").is_null()) << seen["findings"];
}

TEST(Doctor, FindsSmallLimits) {
  struct Case {
    const char *limit, *rule, *text;
  };
  const json sound = report({"--quick"});
  for (const Case& each : {Case{"ulimit -n 64;", "open-files", "may open 64 files"},
                           Case{"ulimit -u 200;", "processes", "may have 200 processes"},
                           Case{"ulimit -v 68719476736;", "virtual-memory", "limited to 64.0 TiB"},
                           Case{"ulimit -f 512;", "file-size", "files are limited to"}}) {
    const json found = finding(report({"--quick"}, kSound, words_in_shell(each.limit)), each.rule);
    ASSERT_FALSE(found.is_null()) << each.rule;
    EXPECT_EQ(found["severity"], "warning");
    EXPECT_NE(found["what"].get<std::string>().find(each.text), std::string::npos) << found;
    EXPECT_NE(found["fix"].get<std::string>().find("ulimit -"), std::string::npos) << found;
    EXPECT_TRUE(finding(sound, each.rule).is_null());
  }
}

TEST(Doctor, CountsTheCoresThatItMayUse) {
  const Words one_core = {"taskset", "-c", "0"};
  const json pinned = report({"--quick", "--nproc", "2"}, kSound, one_core);
  EXPECT_EQ(pinned["devices"]["cores_usable"], 1);
  const json found = finding(pinned, "too-few-cores");
  ASSERT_FALSE(found.is_null());
  EXPECT_NE(found["what"].get<std::string>().find("2 ranks share 1 usable core"), std::string::npos) << found;
  EXPECT_TRUE(finding(report({"--quick", "--nproc", "1"}, kSound, one_core), "too-few-cores").is_null());
}

TEST(Doctor, FindsFaultsOfTheFolder) {
  const TempDir folder;
  const std::string file = folder.path() + "/file", missing = folder.path() + "/missing";
  std::ofstream(file) << "x";
  for (const std::string& path : {file, missing}) {
    const json found = finding(report({"--quick", "--folder", path}), "folder-missing");
    ASSERT_FALSE(found.is_null()) << path;
    EXPECT_EQ(found["severity"], "error");
  }
  EXPECT_TRUE(finding(report({"--quick", "--folder", folder.path()}), "folder-missing").is_null());

  // What no user may write to, root included. The other parts are measured all the same.
  const json seen = report({"--nproc", "1", "--folder", "/proc"});
  const json found = finding(seen, "folder-not-writable");
  ASSERT_FALSE(found.is_null()) << seen["findings"];
  EXPECT_EQ(found["severity"], "error");
  EXPECT_GT(seen["collectives"]["shm"].value("latency_us", 0.0), 0) << seen;
}

TEST(Doctor, SaysWhyRanksCannotTalk) {
  const TempDir folder;
  const Words quick_folder = {"--folder", folder.path()};
  // shm needs no interface, Gloo does.
  const json seen = report(quick_folder, {"OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=nosuch0"});
  const json found = finding(seen, "collectives-failed");
  ASSERT_FALSE(found.is_null()) << seen["findings"];
  EXPECT_EQ(found["severity"], "error");
  EXPECT_NE(found["what"].get<std::string>().find("gloo"), std::string::npos) << found;
  EXPECT_NE(found["what"].get<std::string>().find("nosuch0"), std::string::npos) << found;
  EXPECT_GT(seen["collectives"]["shm"].value("latency_us", 0.0), 0) << seen;

  // No memory files, no checkpoints: the ranks' end and the refused write are both told.
  const json small = report(quick_folder, kSound, words_in_shell("ulimit -f 16;"));
  for (const char* rule : {"file-size", "no-shared-memory", "folder-not-writable"}) {
    EXPECT_FALSE(finding(small, rule).is_null()) << rule << " not in " << small["findings"];
  }
  EXPECT_EQ(small["backends"]["shm"], false);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(Doctor, FindsFaultsOfTheHost) {
  const auto apart = [](const std::string& what, const std::string& command) {
    Words words = {"unshare", "--user", "--map-root-user", what};
    for (const std::string& word : words_in_shell(command)) words.push_back(word);
    return words;
  };
  if (run_process({"unshare", "--user", "--map-root-user", "--net", "--mount", "--uts", "true"}).exit_code != 0) {
    GTEST_SKIP() << kNoUnshare;
  }
  const auto severity = [&](const std::string& what, const std::string& command, const char* rule,
                            const char* absent = "") {
    const json seen = report({"--quick"}, {"OMP_NUM_THREADS=1"}, apart(what, command));
    EXPECT_TRUE(finding(seen, absent).is_null()) << seen["findings"];
    const json found = finding(seen, rule);
    return found.is_null() ? "" : found["severity"].get<std::string>();
  };
  EXPECT_EQ(severity("--uts", "hostname no-such-host.invalid &&", "host-name"), "warning");
  EXPECT_EQ(severity("--uts", "hostname localhost &&", "host-name"), "");
  EXPECT_EQ(severity("--net", "", "no-loopback"), "error");
  EXPECT_EQ(severity("--net", "ip link set lo up &&", "loopback-only", "no-loopback"), "note");
  EXPECT_EQ(severity("--mount", "mount -t tmpfs -o size=16m tmpfs /dev/shm &&", "dev-shm"), "note");
  EXPECT_EQ(severity("--mount", "mount -t tmpfs -o size=2g tmpfs /dev/shm &&", "dev-shm"), "");
}

TEST(Doctor, RefusesWhatMakesNoSense) {
  for (const Words& arguments : {Words{"--nproc", "0"}, Words{"--wat"}, Words{"word"}}) {
    const ProcessResult result = doctor(arguments);
    EXPECT_EQ(result.exit_code, 2) << result.output;
    EXPECT_NE(result.output.find(arguments.front()), std::string::npos) << result.output;
  }
  const ProcessResult help = doctor({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* word : {"--nproc", "--folder", "--quick", "--json", "Exit codes", "Examples"}) {
    EXPECT_NE(help.output.find(word), std::string::npos) << word;
  }
}

/// Started in the background with a marker in its environment, which its ranks inherit.
class Background {
 public:
  explicit Background(const Words& arguments) : marker_("DOCTOR_TEST_MARKER=" + std::to_string(::getpid())) {
    Words words = {fsdp2_program(), "doctor"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::putenv(marker_.data());
    const int null = ::open("/dev/null", O_WRONLY);
    ::dup2(null, STDOUT_FILENO);
    ::dup2(null, STDERR_FILENO);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  ~Background() {
    if (pid_ > 0) ::kill(pid_, SIGKILL), ::waitpid(pid_, nullptr, 0);
  }
  Background(const Background&) = delete;

  /// Signal that ended it after SIGTERM.
  int terminate() {
    ::kill(pid_, SIGTERM);
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  }
  bool has_open(const std::string& name) const {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator("/proc/" + std::to_string(pid_) + "/fd", ignored)) {
      if (fs::read_symlink(entry.path(), ignored).string().find(name) != std::string::npos) return true;
    }
    return false;
  }
  /// Processes with the marker and the word in their command line.
  int count(const std::string& word) const {
    int found = 0;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      const std::string folder = entry.path().string();
      if (!isdigit(static_cast<unsigned char>(entry.path().filename().string()[0]))) continue;
      found += read_file(folder + "/environ").find(marker_) != std::string::npos &&
               read_file(folder + "/cmdline").find(word) != std::string::npos;
    }
    return found;
  }

 private:
  std::string marker_;
  pid_t pid_;
};

bool comes_true(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
  return true;
}

TEST(Doctor, LeavesNothingBehindWhenItIsStopped) {
  const TempDir folder;
  {
    Background program({"--folder", folder.path(), "--nproc", "1"});
    ASSERT_TRUE(comes_true([&] { return program.has_open(".fsdp2-doctor-"); }));
    EXPECT_EQ(program.terminate(), SIGTERM);
    EXPECT_TRUE(fs::is_empty(folder.path()));
  }
  Background program({"--folder", folder.path()});
  ASSERT_TRUE(comes_true([&] { return program.count("--worker") >= 2; }));
  EXPECT_EQ(program.terminate(), SIGTERM);
  EXPECT_TRUE(comes_true([&] { return program.count("doctor") == 0; }));
}

}  // namespace
}  // namespace fsdp2::testing
