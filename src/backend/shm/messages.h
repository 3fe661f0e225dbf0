#pragma once

// send and recv between the ranks of a group.

#include <deque>

#include "backend/shm/work.h"

namespace fsdp2::detail::shm {

class MessageQueue;

class MessageWork final : public ShmWork {
 public:
  static constexpr int kAnyRank = -1;

  /// `peer`: the other rank in the group.
  MessageWork(int rank, c10d::OpType type, int peer, int tag, at::Tensor tensor, std::shared_ptr<MessageQueue> queue)
      : ShmWork(rank, type, {tensor}),
        data_(static_cast<std::byte*>(tensor.data_ptr())),
        bytes_(tensor.nbytes()),
        dtype_(tensor.scalar_type()),
        peer_(peer),
        tag_(tag),
        queue_(std::move(queue)) {}

  int sourceRank() const override { return peer_; }

 private:
  friend class MessageQueue;
  void finish(std::chrono::milliseconds timeout) override;
  Queue& queue() override;
  bool is_send() const { return opType_ == c10d::OpType::SEND; }
  std::string text(const Members& members) const;

  std::byte* data_;
  size_t bytes_;
  at::ScalarType dtype_;
  int peer_, tag_;
  bool announced_ = false;
  size_t moved_ = 0;
  bool head_sent_ = false;
  std::shared_ptr<MessageQueue> queue_;
};

// Note [Messages]
// Each pair of ranks has a pipe in shared memory for each direction, through which messages pass one after another, a
// head (size, dtype, tag) before the bytes of each. All of a rank's messages move together: whoever waits for one of
// them moves the others too, so the order of waiting does not matter. A message whose tag nobody asks for yet is kept
// aside where one behind it is asked for.
class MessageQueue final : public Queue {
 public:
  explicit MessageQueue(std::shared_ptr<Team> team);

  void add(c10::intrusive_ptr<MessageWork> work);
  void finish(MessageWork& work, std::chrono::milliseconds timeout);
  void cancel() noexcept;

  bool stands_still() override;
  void catch_up() noexcept override;

 private:
  using WorkPtr = c10::intrusive_ptr<MessageWork>;
  /// The lock on everything. Futures of what was completed under it are marked when it is gone.
  class Locked {
   public:
    explicit Locked(MessageQueue& queue) : queue_(queue), lock_(queue.mutex_) {}
    ~Locked();
    Locked(const Locked&) = delete;

   private:
    MessageQueue& queue_;
    std::unique_lock<std::mutex> lock_;
  };
  struct Head {
    uint64_t bytes;
    int32_t tag;
    int32_t dtype;
  };
  struct Pipe {
    Line written, read;
  };
  struct Incoming {
    bool under_way = false;
    Head head{};
    size_t moved = 0;
    WorkPtr work;  // null: nobody asked for it yet, or nobody can take it
    std::vector<std::byte> aside;
  };

  Pipe& pipe(int from, int to) const { return *reinterpret_cast<Pipe*>(team_->at(layout_.message(from, to))); }
  Line& bell(int rank) const { return bells_[rank]; }
  void write(int to, uint64_t position, const std::byte* from, size_t bytes) const;
  void read(int from, uint64_t position, std::byte* to, size_t bytes) const;

  void move_all();
  void move_out(int to);
  void move_in(int from);
  WorkPtr find_receiver(int from, int32_t tag);
  bool is_awaited(int from) const;
  void deliver(int from, const Head& head, const WorkPtr& work);
  void complete(MessageWork& work, std::exception_ptr error) noexcept;
  void fail_all(const std::exception_ptr& error) noexcept;
  void check_alive(const MessageWork& work) const;

  std::shared_ptr<Team> team_;
  const Layout& layout_;
  const int rank_, size_;
  Line* bells_;  // of a rank: something happened in a pipe of its
  std::mutex mutex_;
  std::vector<std::deque<WorkPtr>> sends_;   // by destination
  std::deque<WorkPtr> receives_;             // that no message has been found for
  std::vector<Incoming> incoming_;           // by source
  std::vector<std::deque<Incoming>> aside_;  // complete, by source
  size_t num_queued_ = 0;
  std::vector<WorkPtr> futures_to_mark_;
};

}  // namespace fsdp2::detail::shm
