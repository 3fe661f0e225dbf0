#include "backend/shm/team.h"

#include <c10/util/StringUtil.h>

#include <cstring>

#include "backend/shm/share_file.h"

namespace fsdp2::detail::shm {

using std::chrono::milliseconds;

Team::Team(File file, std::shared_ptr<SharedMemory> memory, const Layout& layout, const BackendRequest& request,
           std::string name)
    : memory_(std::move(memory)),
      layout_(layout),
      members_(std::make_shared<Members>(std::move(file), memory_,
                                         reinterpret_cast<MemberState*>(memory_->data() + layout.states), request.rank,
                                         request.global_ranks, request.timeout)),
      steps_(members_, memory_, memory_->data() + layout.steps),
      name_(std::move(name)) {}

void Team::step_barrier(const char* what) {
  steps_.post(++steps_taken_);
  steps_.wait(steps_taken_, what);
}

void Team::together(const char* what, const std::function<void()>& step) {
  MemberState& mine = members_->state(members_->rank());
  mine.step_error.store(0);
  try {
    step();
  } catch (const std::exception& thrown) {
    const Error error = as_error(thrown);
    std::strncpy(mine.step_text, error.what_without_backtrace(), sizeof(mine.step_text) - 1);
    mine.step_order.store(members_->state(0).num_errors.fetch_add(1));
    mine.step_error.store(static_cast<int32_t>(error.code()));
  }
  step_barrier(what);
  // The first error: the others may have come of it.
  int32_t code = 0;
  uint32_t order = 0;
  std::string text;
  for (int rank = 0; rank < members_->size(); ++rank) {
    const MemberState& state = members_->state(rank);
    if (state.step_error.load() == 0 || (code != 0 && state.step_order.load() > order)) continue;
    code = state.step_error.load();
    order = state.step_order.load();
    text = state.step_text;
  }
  step_barrier(what);  // nobody changes what another rank still reads
  if (code != 0) throw Error(static_cast<ErrorCode>(code), text);
}

std::shared_ptr<SharedMemory> Team::make_memory(size_t bytes, const char* what) {
  FSDP2_CHECK(bytes > 0, kInvalidArgument, "[shm] ", what, ": 0 bytes of shared memory");
  members_->check_usable();
  const int rank = members_->rank(), size = members_->size();
  members_->state(rank).argument.store(bytes);
  File file;
  std::unique_ptr<FileServer> server;
  const std::string name = c10::str(name_, "/", ++files_made_);
  together(what, [&] {
    if (rank != 0) return;
    file = make_memory_file(bytes, bytes, what);
    server = std::make_unique<FileServer>(name);
  });
  together(what, [&] {
    const uint64_t first = members_->state(0).argument.load();
    FSDP2_CHECK(first == bytes, kInvalidArgument, "[shm] ", what, ": ", members_->name(rank), " asks for ", bytes,
                " bytes but ", members_->name(0), " for ", first, "; all ranks must ask for the same");
  });
  std::shared_ptr<SharedMemory> memory;
  together(what, [&] {
    const auto failed = [&] {
      for (int other = 1; other < size; ++other) {
        if (members_->state(other).step_error.load() != 0) return true;
        members_->check_alive(other, what);
      }
      return false;
    };
    if (rank == 0) {
      // Closed when this step ends, however it does: nobody who asks later waits for an answer.
      const std::unique_ptr<FileServer> serving = std::move(server);
      for (int served = 0; served + 1 < size;) {
        if (serving->serve(file, milliseconds(20))) {
          ++served;
        } else if (failed()) {
          break;
        }
      }
    } else {
      file = ask_for_file(name, members_->timeout());
    }
    memory = std::make_shared<SharedMemory>(file, bytes, what);
  });
  // Every rank takes the memory of its own part, so that it lies close to it, and then the tables for the rest.
  const size_t part = bytes / static_cast<size_t>(size);
  together(what, [&] {
    const size_t begin = part * static_cast<size_t>(rank);
    memory->populate(begin, rank == size - 1 ? bytes - begin : part, what);
  });
  together(what, [&] { memory->populate(0, bytes, what); });
  return memory;
}

std::shared_ptr<Signals> Team::make_signals() {
  auto memory = make_memory(Signals::bytes_for(members_->size()), "the signals of a group");
  std::byte* const lines = memory->data();
  return std::make_shared<Signals>(members_, std::move(memory), lines);
}

}  // namespace fsdp2::detail::shm
