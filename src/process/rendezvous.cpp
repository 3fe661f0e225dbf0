// How the ranks find each other, and say who is missing.

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <string_view>
#include <thread>

#include <fsdp2/error.h>

#include "backend/backend.h"
#include "backend/fake.h"
#include "backend/shm/host.h"
#include "process/collectives.h"
#include "process/world.h"

namespace fsdp2::detail {

namespace {

using std::chrono::milliseconds;

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || value[0] == '\0' ? std::nullopt : std::optional<std::string>(value);
}

int parse_int(const std::string& text, const char* where) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  FSDP2_CHECK(error == std::errc() && end == text.data() + text.size(), kInvalidArgument, "[process_group] ", where,
              " is \"", text, "\"; expected an integer");
  return value;
}

/// The first of `names` that is set: torchrun's first, then those of mpirun and srun.
std::optional<int> int_from(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (const auto text = environment(name)) {
      return parse_int(*text, name);
    }
  }
  return std::nullopt;
}

bool diagnose_from_environment() {
  const std::string text = environment("FSDP2_DIAGNOSE").value_or("0");
  FSDP2_CHECK(text == "0" || text == "1", kInvalidArgument, "[diagnose] FSDP2_DIAGNOSE is \"", text,
              "\"; expected 1, which prints what diagnose() finds after the first step, or 0");
  return text == "1";
}

/// The variables that decide in which exchanges a rank takes part: ranks that differ would wait for each other.
std::string exchange_settings() {
  return c10::str("FSDP2_DEBUG ", environment("FSDP2_DEBUG").value_or("not set"), " and FSDP2_SHM_IN_PLACE ",
                  environment("FSDP2_SHM_IN_PLACE") == "0" ? "0" : "not 0");
}

struct Address {
  std::string host;
  uint16_t port = 0;
  bool agent_hosts_store = false;  // the launcher serves the store: every rank is a client
};

uint16_t checked_port(int port, const std::string& where) {
  FSDP2_CHECK(port > 0 && port < 65536, kInvalidArgument, "[process_group] ", where, " gives port ", port,
              "; expected 1 to 65535");
  return static_cast<uint16_t>(port);
}

Address address_from_environment() {
  const auto host = environment("MASTER_ADDR");
  const auto port = environment("MASTER_PORT");
  FSDP2_CHECK(host && port, kInvalidArgument, "[process_group] init_method env:// needs ", host ? "" : "MASTER_ADDR ",
              !host && !port ? "and " : "", port ? "" : "MASTER_PORT ",
              "in the environment: start the program with `fsdp2 run --nproc-per-node N program`, or set them");
  return {*host, checked_port(parse_int(*port, "MASTER_PORT"), "MASTER_PORT"),
          environment("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True"};
}

Address address_from_url(const std::string& url) {
  const std::string rest = url.substr(std::string_view("tcp://").size());
  const size_t colon = rest.rfind(':');
  FSDP2_CHECK(colon != std::string::npos && colon > 0, kInvalidArgument, "[process_group] init_method \"", url,
              "\" has no port; expected tcp://host:port");
  return {rest.substr(0, colon), checked_port(parse_int(rest.substr(colon + 1), "init_method"), url)};
}

c10::intrusive_ptr<c10d::Store> open_tcp_store(const Address& address, const World& world) {
  c10d::TCPStoreOptions options;
  options.port = address.port;
  options.isServer = !address.agent_hosts_store && world.rank == 0;
  options.numWorkers = static_cast<size_t>(world.world_size);
  options.waitWorkers = false;  // check_in() below waits, and can say who is missing
  options.multiTenant = true;
  options.timeout = world.timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(address.host, options);
  } catch (const std::exception& error) {
    const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
    FSDP2_THROW(kPeerFailed, "[process_group] rank ", world.rank,
                options.isServer ? " cannot listen on " : " cannot reach the master at ", address.host, ":",
                address.port, " within ", world.timeout.count(),
                " ms; expected rank 0 (or the launcher) to serve it there: check MASTER_ADDR "
                "and MASTER_PORT and that rank 0 is running. Cause: ",
                c10_error != nullptr ? c10_error->what_without_backtrace() : error.what());
  }
}

std::string rank_key(int rank) { return c10::str("rank/", rank); }

/// One of the ranks serves the store: it must not go before the others have read the verdict. Not for long: some may
/// never come.
void wait_until_all_know(c10d::Store& store, int world_size) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(3);
  try {
    store.add("told", 1);
    while (store.add("told", 0) < world_size && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(20));
    }
  } catch (const std::exception&) {
    // It went. The verdict is the error to report.
  }
}

/// Tells every rank why the job cannot start, then throws it here.
[[noreturn]] void refuse(c10d::Store& store, int world_size, const std::string& text) {
  store.set("verdict", "refused: " + text);
  wait_until_all_know(store, world_size);
  throw Error(ErrorCode::kInvalidArgument, "[process_group] " + text);
}

std::string missing_ranks(c10d::Store& store, int world_size) {
  std::string names;
  int missing = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    if (!store.check({rank_key(rank)}) && ++missing <= 16) {
      names += c10::str(missing > 1 ? ", " : "", rank);
    }
  }
  return c10::str(missing, " of ", world_size, " ranks never came: ", names, missing > 16 ? ", ..." : "");
}

/// Every rank shows up once, with the same world size and settings, within the timeout.
void check_in(c10d::Store& store, World& world) {
  const std::string size_text = std::to_string(world.world_size), settings = exchange_settings();
  if (store.add("first", 1) == 1) {
    store.set("settings", settings);
    store.set("world_size", size_text);
  }
  const std::string agreed = store.get_to_str("world_size");
  if (agreed != size_text) {
    refuse(store, world.world_size,
           c10::str("rank ", world.rank, " was started with world size ", size_text, " but another rank with ", agreed,
                    "; WORLD_SIZE must be equal on all ranks"));
  }
  if (const std::string others = store.get_to_str("settings"); others != settings) {
    refuse(store, world.world_size,
           c10::str("rank ", world.rank, " was started with ", settings, " but another rank with ", others,
                    "; these variables must be equal on all ranks"));
  }
  if (store.add(c10::str("claims/", world.rank), 1) > 1) {
    refuse(store, world.world_size,
           c10::str("two processes claim rank ", world.rank, " of ", size_text,
                    "; every process needs a RANK of its own"));
  }
  if (world.rank == 0 && world.diagnose) store.set("diagnose", "1");  // its table is wanted: all take part
  const std::string host_key = "host/" + shm::host_identity();
  store.add(host_key, 1);
  store.set(rank_key(world.rank), size_text);
  if (store.add("joined", 1) == world.world_size) {
    store.set("verdict", "start");
  }
  try {
    store.wait({"verdict"}, world.timeout);
  } catch (const std::exception&) {
    FSDP2_THROW(kTimeout, "[process_group] rank ", world.rank, " waited ", world.timeout.count(),
                " ms: ", missing_ranks(store, world.world_size),
                ". Start them with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or look for their errors");
  }
  const std::string verdict = store.get_to_str("verdict");
  if (verdict != "start") wait_until_all_know(store, world.world_size);
  FSDP2_CHECK(verdict == "start", kInvalidArgument, "[process_group] the job was ", verdict);
  world.single_host = store.add(host_key, 0) == world.world_size;
  world.diagnose = store.check({"diagnose"});
}

}  // namespace

void rendezvous(const ProcessGroupOptions& options, World& world) {
  world.timeout = bounded_timeout(options.timeout);
  world.diagnose = diagnose_from_environment();
  FSDP2_CHECK(options.timeout.count() > 0, kInvalidArgument, "[process_group] timeout is ", options.timeout.count(),
              " ms; it must be positive");
  const auto rank =
      options.rank ? options.rank : int_from({"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"});
  const auto size = options.world_size ? options.world_size
                                       : int_from({"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"});
  FSDP2_CHECK(rank && size, kInvalidArgument, "[process_group] ", rank ? "" : "RANK ", !rank && !size ? "and " : "",
              size ? "" : "WORLD_SIZE ",
              "not set: start the program with `fsdp2 run --nproc-per-node N program` "
              "(torchrun, mpirun and srun work too), or pass .rank and .world_size");
  FSDP2_CHECK(*size >= 1 && *rank >= 0 && *rank < *size, kInvalidArgument, "[process_group] rank ", *rank,
              " of world size ", *size, " is impossible; expected 0 <= rank < world size");
  world.rank = *rank;
  world.world_size = *size;
  const auto local = options.local_rank ? options.local_rank
                                        : int_from({"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                                                    "PMI_LOCAL_RANK", "SLURM_LOCALID"});
  world.local_rank = local.value_or(0);
  FSDP2_CHECK(world.local_rank >= 0, kInvalidArgument, "[process_group] local rank is ", world.local_rank,
              "; it must not be negative");

  if (options.backend == "fake") {  // nobody to meet
    world.store = fake_backend::make_store();
    return;
  }

  // A second init_process_group in the same processes must not meet the keys of the first.
  static int generation = 0;
  const std::string& method = options.init_method;
  c10::intrusive_ptr<c10d::Store> base;
  if (method.rfind("file://", 0) == 0) {
    const std::string path = method.substr(std::string_view("file://").size());
    FSDP2_CHECK(!path.empty() && path[0] == '/', kInvalidArgument, "[process_group] init_method \"", method,
                "\" must be file:// and an absolute path");
    base = c10::make_intrusive<c10d::FileStore>(path, world.world_size);
  } else {
    FSDP2_CHECK(method == "env://" || method.rfind("tcp://", 0) == 0, kInvalidArgument,
                "[process_group] init_method \"", method,
                "\" is unknown; expected env://, tcp://host:port or file:///path");
    const Address address = method == "env://" ? address_from_environment() : address_from_url(method);
    base = open_tcp_store(address, world);
  }
  base->setTimeout(world.timeout);
  world.store = c10::make_intrusive<c10d::PrefixStore>(c10::str("fsdp2/", generation++), base);
  try {
    check_in(*world.store, world);
  } catch (...) {
    rethrow_c10d_error(c10::str("rendezvous of rank ", world.rank));
  }
}

}  // namespace fsdp2::detail
