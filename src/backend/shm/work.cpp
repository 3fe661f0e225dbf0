#include "backend/shm/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <thread>

#include <fsdp2/error.h>

namespace fsdp2::detail::shm {

// The one thread of the process that looks after queues, see Note [Who carries operations out]. It lives as long as the
// process and touches nothing that ends before; it sleeps for good while nothing is queued anywhere.
class Helper {
 public:
  static Helper& get() {
    static auto& helper = *new Helper;
    return helper;
  }

  void watch(const std::shared_ptr<Queue>& queue) {
    const std::lock_guard lock(mutex_);
    queues_.push_back(queue);
    if (started_) return;
    started_ = true;
    std::thread([this] { run(); }).detach();
  }

  void queued() {
    queued_.fetch_add(1);
    if (!asleep_.load()) return;
    const std::lock_guard lock(mutex_);
    asleep_.store(false);
    wake_.notify_one();
  }
  void done() noexcept { queued_.fetch_sub(1); }

 private:
  static constexpr auto kLook = std::chrono::milliseconds(10);
  static constexpr int kIdleLooks = 20;

  void run() {
    int idle = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      idle = queued_.load() == 0 ? idle + 1 : 0;
      if (idle > kIdleLooks) {
        asleep_.store(true);
        if (queued_.load() == 0) wake_.wait(lock, [this] { return !asleep_.load(); });
        asleep_.store(false);
        idle = 0;
      }
      wake_.wait_for(lock, kLook);
      if (queued_.load() != 0) look(lock);
    }
  }

  void look(std::unique_lock<std::mutex>& lock) {
    std::vector<std::shared_ptr<Queue>> queues;
    for (size_t i = 0; i < queues_.size();) {
      if (auto queue = queues_[i].lock()) {
        queues.push_back(std::move(queue));
        ++i;
      } else {
        queues_.erase(queues_.begin() + static_cast<ptrdiff_t>(i));
      }
    }
    lock.unlock();
    for (std::shared_ptr<Queue>& queue : queues) {
      const uint64_t num_done = queue->num_done_.load();
      const bool moved = num_done != queue->num_done_seen_;
      queue->num_done_seen_ = num_done;
      if (moved || !queue->stands_still() || queue->being_helped_.exchange(true)) continue;
      std::thread([queue = std::move(queue)] {
        queue->catch_up();
        queue->being_helped_.store(false);
      }).detach();
    }
    queues.clear();
    lock.lock();
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::weak_ptr<Queue>> queues_;
  std::atomic<int64_t> queued_{0};
  std::atomic<bool> asleep_{false};
  bool started_ = false;
};

void Queue::something_queued() {
  if (!watched_) {
    watched_ = true;
    Helper::get().watch(shared_from_this());
  }
  Helper::get().queued();
}

void Queue::something_done() noexcept {
  num_done_.fetch_add(1);
  Helper::get().done();
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (!isCompleted()) finish(timeout);
  if (error_ != nullptr) std::rethrow_exception(error_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  if (!isCompleted()) finish(std::chrono::milliseconds(0));
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  if (error_ != nullptr) {
    future->setError(error_);
  } else {
    future->markCompleted(c10::IValue(outputs_));
  }
  return future;
}

void CollectiveWork::finish(std::chrono::milliseconds timeout) { queue_->finish(*this, timeout); }

void CollectiveQueue::add(c10::intrusive_ptr<CollectiveWork> work, bool waited_for_at_once) {
  CollectiveWork* const added = work.get();
  const std::lock_guard lock(mutex_);
  added->announced_ = !waited_for_at_once;
  if (added->announced_) something_queued();
  if (last_ == nullptr) {
    first_ = std::move(work);
  } else {
    last_->next_ = std::move(work);
  }
  last_ = added;
}

c10::intrusive_ptr<CollectiveWork> CollectiveQueue::pop() {
  c10::intrusive_ptr<CollectiveWork> work = std::move(first_);
  first_ = std::move(work->next_);
  if (!first_.defined()) last_ = nullptr;
  return work;
}

void CollectiveQueue::run_first(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds timeout) {
  running_ = true;
  const c10::intrusive_ptr<CollectiveWork> work = pop();
  lock.unlock();
  std::exception_ptr error;
  try {
    for (Collective& collective : work->collectives_) {
      if (timeout.count() > 0) collective.timeout = timeout;
      engine_.run(collective);
    }
  } catch (...) {
    error = std::current_exception();
  }
  work->inputs_.clear();
  lock.lock();
  running_ = false;
  complete(*work, std::move(error));
}

void CollectiveQueue::complete(CollectiveWork& work, std::exception_ptr error) noexcept {
  if (work.announced_) something_done();
  work.complete(std::move(error));
  changed_.notify_all();
}

void CollectiveQueue::finish(CollectiveWork& work, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  while (!work.isCompleted()) {
    if (running_) {
      changed_.wait(lock);
    } else {
      run_first(lock, timeout);
    }
  }
}

void CollectiveQueue::cancel() noexcept {
  const std::lock_guard lock(mutex_);
  while (first_.defined()) {
    const c10::intrusive_ptr<CollectiveWork> work = pop();
    complete(*work, std::make_exception_ptr(Error(
                        ErrorCode::kCancelled, "[shm] the group was destroyed before this operation was carried out")));
  }
}

bool CollectiveQueue::stands_still() {
  const std::lock_guard lock(mutex_);
  return !running_ && first_.defined();
}

void CollectiveQueue::catch_up() noexcept {
  std::unique_lock lock(mutex_);
  while (first_.defined()) {
    if (running_) {
      changed_.wait(lock);
    } else {
      run_first(lock, std::chrono::milliseconds(0));
    }
  }
}

}  // namespace fsdp2::detail::shm
