// How the ranks of a group find each other's memory.

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <random>

#include "backend/shm/host.h"
#include "backend/shm/share_file.h"
#include "backend/shm/team.h"
#include "process/collectives.h"

namespace fsdp2::detail::shm {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kWhat = "connecting a group";

/// Rank 0's memory, or the reason why nobody has it, as a text in the store: "ok <name>" or "<error code> <text>".
std::string error_text(const std::exception& thrown) {
  const Error error = as_error(thrown);
  return c10::str(static_cast<int>(error.code()), " ", error.what_without_backtrace());
}

void throw_if_error(const std::string& text) {
  if (text.rfind("ok", 0) == 0) return;
  const size_t space = text.find(' ');
  throw Error(static_cast<ErrorCode>(std::stoi(text.substr(0, space))), text.substr(space + 1));
}

std::string wait_for_key(const BackendRequest& request, const std::string& key, const std::string& who) {
  try {
    request.store->wait({key}, request.timeout);
  } catch (const std::exception&) {
    FSDP2_THROW(kTimeout, "[shm] ", kWhat, " of ranks ", c10::Join(", ", request.global_ranks), " timed out after ",
                request.timeout.count(), " ms: ", who, " did not come");
  }
  return request.store->get_to_str(key);
}

std::string rank_name(const BackendRequest& request, int rank) {
  return c10::str("rank ", request.global_ranks[static_cast<size_t>(rank)]);
}

/// Rank 0: kInvalidArgument unless all ranks have told the same host.
void check_one_host(const BackendRequest& request) {
  std::map<std::string, std::vector<int>> ranks_of;
  for (int rank = 0; rank < request.world_size; ++rank) {
    const std::string host = wait_for_key(request, c10::str("host/", rank), rank_name(request, rank));
    ranks_of[host].push_back(request.global_ranks[static_cast<size_t>(rank)]);
  }
  if (ranks_of.size() == 1) return;
  std::string hosts;
  for (const auto& [host, ranks] : ranks_of) {
    hosts += c10::str(hosts.empty() ? "" : "; ", "ranks ", c10::Join(", ", ranks), " on ", host);
  }
  FSDP2_THROW(kInvalidArgument, "[shm] the ranks of a group are not on one host: ", hosts,
              ". Backend \"shm\" needs all of them on one, in one network namespace: use \"cpu:gloo\"");
}

std::string random_name() {
  std::random_device random;
  return c10::str("fsdp2/", random(), "-", random(), "-", random(), "-", random());
}

/// Rank 0 gives the file to all others; ends early where one of them says that it failed.
void serve_all(const BackendRequest& request, FileServer& server, const File& file) {
  const auto deadline = Clock::now() + request.timeout;
  for (int served = 0; served + 1 < request.world_size;) {
    if (server.serve(file, milliseconds(100))) {
      ++served;
      continue;
    }
    for (int rank = 1; rank < request.world_size; ++rank) {
      const std::string key = c10::str("state/", rank);
      if (request.store->check({key})) throw_if_error(request.store->get_to_str(key));
    }
    FSDP2_CHECK(Clock::now() < deadline, kTimeout, "[shm] ", kWhat, " timed out after ", request.timeout.count(),
                " ms: only ", served, " of ", request.world_size - 1, " ranks asked for the memory");
  }
}

}  // namespace

std::shared_ptr<Team> Team::join(const BackendRequest& request) {
  c10d::Store& store = *request.store;
  const Layout layout(request.world_size);
  const bool first = request.rank == 0;
  std::shared_ptr<Team> team;
  File file;
  std::string name;
  std::unique_ptr<FileServer> server;
  if (!request.single_host) store.set(c10::str("host/", request.rank), host_identity());

  // Rank 0 collects what the others say and tells everybody the outcome, so that all of them come to the same.
  std::string start;
  if (first) {
    try {
      if (!request.single_host) check_one_host(request);
      name = random_name();
      file = make_memory_file(layout.bytes, layout.busy_bytes, kWhat);
      server = std::make_unique<FileServer>(name);
      start = "ok " + name;
    } catch (const std::exception& error) {
      start = error_text(error);
    }
    store.set("start", start);
  } else {
    start = wait_for_key(request, "start", rank_name(request, 0));
  }
  throw_if_error(start);
  name = start.substr(3);

  std::string state = "ok";
  try {
    if (first) {
      serve_all(request, *server, file);
    } else {
      file = ask_for_file(name, request.timeout);
    }
    auto memory = std::make_shared<SharedMemory>(file, layout.bytes, kWhat);
    memory->populate(layout.chunk(request.rank, 0), Layout::kSlots * Layout::kChunkBytes, kWhat);
    team = std::shared_ptr<Team>(new Team(std::move(file), std::move(memory), layout, request, name));
  } catch (const std::exception& error) {
    state = error_text(error);
  }
  store.set(c10::str("state/", request.rank), state);

  std::string verdict = "ok";
  if (first) {
    for (int rank = 0; rank < request.world_size && verdict == "ok"; ++rank) {
      try {
        verdict = wait_for_key(request, c10::str("state/", rank), rank_name(request, rank));
      } catch (const std::exception& error) {
        verdict = error_text(error);
      }
    }
    store.set("verdict", verdict);
  } else {
    verdict = wait_for_key(request, "verdict", rank_name(request, 0));
  }
  throw_if_error(verdict);
  try {
    team->memory_->populate(0, layout.busy_bytes, kWhat);
  } catch (const Error&) {
    // Only the tables for memory that other ranks have taken: the first touch makes them too.
  }
  team->members_->count_processors(request.single_host ? request.job_size : request.world_size);
  return team;
}

}  // namespace fsdp2::detail::shm
