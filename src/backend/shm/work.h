#pragma once

// What c10d hands out for an operation that is under way, and who carries it out.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/shm/collective.h"

namespace fsdp2::detail::shm {

// Note [Who carries operations out]
// An operation is queued when it is called. The thread that waits for it carries out the queue up to it, so that a call
// and its wait() cost no change of threads. If nobody waits, the other ranks must not wait in vain: a thread of the
// process looks at the queues now and then, and starts a thread that carries out one that has stood still. For a
// future, and for a wait of limited time, which must not end the operation, such a thread starts at once. Every queue
// is independent of the others, so a program whose ranks make the same calls on each group never blocks itself.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  virtual ~Queue() = default;
  /// Work that no thread is on.
  virtual bool stands_still() = 0;
  /// Carries out what is queued; errors go to the works.
  virtual void catch_up() noexcept = 0;

  /// To be told by whoever queues something that is not waited for at once, and when it is done.
  void something_queued();
  void something_done() noexcept;
  /// Begins catch_up() in a thread of its own.
  void catch_up_elsewhere();

 private:
  friend class Helper;
  bool watched_ = false;
  std::atomic<uint64_t> num_done_{0};
  uint64_t num_done_seen_ = 0;  // by the helper
  std::atomic<bool> being_helped_{false};
};

class ShmWork : public c10d::Work {
 public:
  ShmWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs)
      : c10d::Work(rank, type), outputs_(std::move(outputs)) {}

  bool isCompleted() override { return done_.load(std::memory_order_acquire); }
  bool isSuccess() const override { return done_.load(std::memory_order_acquire) && error_ == nullptr; }
  std::exception_ptr exception() const override { return isSuccess() ? nullptr : error_; }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(std::chrono::milliseconds(0)); }
  std::vector<at::Tensor> result() override { return outputs_; }
  /// Does not wait: another thread carries the operation out.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  void complete(std::exception_ptr error) noexcept {
    error_ = std::move(error);
    done_.store(true);
  }
  /// Whoever completes a work looks, after that, whether its future is wanted, and marks it without holding a lock:
  /// what others hung on the future runs then.
  bool future_wanted() const noexcept { return future_wanted_.load(); }
  void mark_future() noexcept;

 protected:
  /// Blocks until the work is completed.
  virtual void finish(std::chrono::milliseconds timeout) = 0;
  virtual Queue& queue() = 0;

 private:
  std::vector<at::Tensor> outputs_;
  std::exception_ptr error_;
  std::atomic<bool> done_{false}, future_wanted_{false};
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_marked_ = false;
};

class CollectiveQueue;

class CollectiveWork final : public ShmWork {
 public:
  CollectiveWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                 std::vector<Collective> collectives, std::shared_ptr<CollectiveQueue> queue)
      : ShmWork(rank, type, std::move(outputs)),
        inputs_(std::move(inputs)),
        collectives_(std::move(collectives)),
        queue_(std::move(queue)) {}

 private:
  friend class CollectiveQueue;
  void finish(std::chrono::milliseconds timeout) override;
  Queue& queue() override;

  std::vector<at::Tensor> inputs_;  // kept alive
  std::vector<Collective> collectives_;
  std::shared_ptr<CollectiveQueue> queue_;
  bool announced_ = false;  // to the helper
  c10::intrusive_ptr<CollectiveWork> next_;
};

/// The collectives of a group, in the order of their calls.
class CollectiveQueue final : public Queue {
 public:
  explicit CollectiveQueue(std::shared_ptr<Team> team) : engine_(std::move(team)) {}

  void add(c10::intrusive_ptr<CollectiveWork> work, bool waited_for_at_once);
  void finish(CollectiveWork& work, std::chrono::milliseconds timeout);
  /// Works that nobody has begun fail with kCancelled.
  void cancel() noexcept;
  uint64_t calls() const { return engine_.calls(); }

  bool stands_still() override;
  void catch_up() noexcept override;

 private:
  c10::intrusive_ptr<CollectiveWork> pop();
  void complete(CollectiveWork& work, std::exception_ptr error) noexcept;
  void finish_within(CollectiveWork& work, std::chrono::milliseconds timeout, std::unique_lock<std::mutex>& lock);
  void run_first(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable changed_;
  c10::intrusive_ptr<CollectiveWork> first_;
  CollectiveWork* last_ = nullptr;
  bool running_ = false;
  CollectiveEngine engine_;  // used by the thread that set running_
};

}  // namespace fsdp2::detail::shm
