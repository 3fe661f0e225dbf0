#include "backend/shm/shm_backend.h"

#include "backend/backend.h"
#include "backend/shm/team.h"

namespace fsdp2::detail {

namespace shm {

namespace {

class DoneWork : public c10d::Work {
 public:
  DoneWork() { finish(); }
};

}  // namespace

ShmBackend::ShmBackend(std::shared_ptr<Team> team)
    : c10d::Backend(team->members().rank(), team->members().size()), team_(std::move(team)) {}

ShmBackend::~ShmBackend() = default;

std::shared_ptr<SharedMemory> ShmBackend::make_memory(size_t bytes, const char* what) {
  return team_->make_memory(bytes, what);
}

std::shared_ptr<Signals> ShmBackend::make_signals() { return team_->make_signals(); }

c10::intrusive_ptr<c10d::Work> ShmBackend::barrier(const c10d::BarrierOptions&) {
  team_->together("barrier", [] {});
  return c10::make_intrusive<DoneWork>();
}

ShmBackend* shm_backend_of(const ProcessGroup& group) {
  if (!group.defined() || !group->hasBackendForDeviceType(c10::DeviceType::CPU)) return nullptr;
  return dynamic_cast<ShmBackend*>(group->getBackend(c10::DeviceType::CPU).get());
}

}  // namespace shm

namespace shm_backend {

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request) {
  return c10::make_intrusive<shm::ShmBackend>(shm::Team::join(request));
}

}  // namespace shm_backend

}  // namespace fsdp2::detail
