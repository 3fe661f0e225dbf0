#include "backend/shm/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <thread>

#include <fsdp2/error.h>

#include "backend/backend.h"

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
      if (!moved && queue->stands_still()) queue->catch_up_elsewhere();
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

void Queue::catch_up_elsewhere() {
  if (being_helped_.exchange(true)) return;
  std::thread([queue = shared_from_this()] {
    queue->catch_up();
    queue->being_helped_.store(false);
  }).detach();
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (!isCompleted()) finish(bounded_timeout(timeout));
  if (error_ != nullptr) std::rethrow_exception(error_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(future_mutex_);
    if (!future_.defined()) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    }
    future = future_;
  }
  // Either this sees that the work is done, or who completes it sees that the future is wanted.
  future_wanted_.store(true);
  if (done_.load()) {
    mark_future();
  } else {
    queue().catch_up_elsewhere();
  }
  return future;
}

void ShmWork::mark_future() noexcept {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(future_mutex_);
    if (future_marked_) return;
    future_marked_ = true;
    future = future_;
  }
  if (error_ != nullptr) {
    future->setError(error_);
  } else {
    future->markCompleted(c10::IValue(outputs_));
  }
}

void CollectiveWork::finish(std::chrono::milliseconds timeout) { queue_->finish(*this, timeout); }

Queue& CollectiveWork::queue() { return *queue_; }

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

void CollectiveQueue::run_first(std::unique_lock<std::mutex>& lock) {
  running_ = true;
  const c10::intrusive_ptr<CollectiveWork> work = pop();
  lock.unlock();
  std::exception_ptr error;
  try {
    for (const Collective& collective : work->collectives_) engine_.run(collective);
  } catch (...) {
    error = std::current_exception();
  }
  work->inputs_.clear();
  lock.lock();
  running_ = false;
  complete(*work, std::move(error));
  if (!work->future_wanted()) return;
  lock.unlock();
  work->mark_future();
  lock.lock();
}

void CollectiveQueue::complete(CollectiveWork& work, std::exception_ptr error) noexcept {
  if (work.announced_) something_done();
  work.complete(std::move(error));
  changed_.notify_all();
}

void CollectiveQueue::finish(CollectiveWork& work, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  if (timeout.count() > 0) return finish_within(work, timeout, lock);
  while (!work.isCompleted()) {
    if (running_) {
      changed_.wait(lock);
    } else {
      run_first(lock);
    }
  }
}

/// The time is that of the waiter. The operation has the time of the call or of the group, and its failure is the end
/// of the group, so another thread is on it.
void CollectiveQueue::finish_within(CollectiveWork& work, std::chrono::milliseconds timeout,
                                    std::unique_lock<std::mutex>& lock) {
  if (!running_) catch_up_elsewhere();
  FSDP2_CHECK(changed_.wait_for(lock, timeout, [&] { return work.isCompleted(); }), kTimeout, "[shm] a wait for ",
              c10d::opTypeToString(work.retrieveOpType()), " ended after ", timeout.count(),
              " ms; the operation goes on: wait() for it again");
}

void CollectiveQueue::cancel() noexcept {
  for (;;) {
    c10::intrusive_ptr<CollectiveWork> work;
    {
      const std::lock_guard lock(mutex_);
      if (!first_.defined()) return;
      work = pop();
      complete(*work,
               std::make_exception_ptr(Error(ErrorCode::kCancelled,
                                             "[shm] the group was destroyed before this operation was carried out")));
    }
    if (work->future_wanted()) work->mark_future();
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
      run_first(lock);
    }
  }
}

}  // namespace fsdp2::detail::shm
