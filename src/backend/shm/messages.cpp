#include "backend/shm/messages.h"

#include <c10/util/StringUtil.h>

#include <cstring>

#include <fsdp2/error.h>

namespace fsdp2::detail::shm {

namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kPipeBytes = Layout::kMessageBytes;

void move_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);  // empty tensors have no address
}

}  // namespace

void MessageWork::finish(std::chrono::milliseconds timeout) { queue_->finish(*this, timeout); }

Queue& MessageWork::queue() { return *queue_; }

std::string MessageWork::text(const Members& members) const {
  return c10::str(is_send() ? "send of " : "recv of ", bytes_, " bytes ", dtype_, is_send() ? " to " : " from ",
                  peer_ == kAnyRank ? std::string("any rank") : members.name(peer_), " with tag ", tag_);
}

MessageQueue::MessageQueue(std::shared_ptr<Team> team)
    : team_(std::move(team)),
      layout_(team_->layout()),
      rank_(team_->members().rank()),
      size_(team_->members().size()),
      bells_(reinterpret_cast<Line*>(team_->at(layout_.bells))),
      sends_(static_cast<size_t>(size_)),
      incoming_(static_cast<size_t>(size_)),
      aside_(static_cast<size_t>(size_)) {}

void MessageQueue::write(int to, uint64_t position, const std::byte* from, size_t bytes) const {
  std::byte* const ring = team_->at(layout_.message(rank_, to)) + Layout::kPage;
  const size_t begin = position % kPipeBytes, first = std::min(bytes, kPipeBytes - begin);
  move_bytes(ring + begin, from, first);
  move_bytes(ring, from + first, bytes - first);
}

void MessageQueue::read(int from, uint64_t position, std::byte* to, size_t bytes) const {
  const std::byte* const ring = team_->at(layout_.message(from, rank_)) + Layout::kPage;
  const size_t begin = position % kPipeBytes, first = std::min(bytes, kPipeBytes - begin);
  move_bytes(to, ring + begin, first);
  move_bytes(to + first, ring, bytes - first);
}

void MessageQueue::complete(MessageWork& work, std::exception_ptr error) noexcept {
  if (work.announced_) something_done();
  --num_queued_;
  work.complete(std::move(error));
  if (work.future_wanted()) futures_to_mark_.push_back(WorkPtr::unsafe_reclaim_from_nonowning(&work));
}

MessageQueue::Locked::~Locked() {
  std::vector<WorkPtr> works;
  works.swap(queue_.futures_to_mark_);
  lock_.unlock();
  for (const WorkPtr& work : works) work->mark_future();
}

/// A message of this size for this receiver: fails the receiver where they do not fit.
void MessageQueue::deliver(int from, const Head& head, const WorkPtr& work) {
  if (head.bytes == work->bytes_ && head.dtype == static_cast<int32_t>(work->dtype_)) return complete(*work, nullptr);
  complete(*work, std::make_exception_ptr(
                      Error(ErrorCode::kInvalidArgument,
                            c10::str("[shm] ", team_->members().name(from), " sent ", head.bytes, " bytes ",
                                     static_cast<at::ScalarType>(head.dtype), " with tag ", head.tag, " but ",
                                     team_->members().name(rank_), " receives ", work->bytes_, " bytes ", work->dtype_,
                                     "; both sides must name the same size and dtype"))));
}

/// The oldest receive that takes a message of `tag` from `from`, taken from the list; null where there is none.
MessageQueue::WorkPtr MessageQueue::find_receiver(int from, int32_t tag) {
  for (auto it = receives_.begin(); it != receives_.end(); ++it) {
    MessageWork& work = **it;
    if ((work.peer_ != from && work.peer_ != MessageWork::kAnyRank) || work.tag_ != tag) continue;
    WorkPtr found = std::move(*it);
    receives_.erase(it);
    found->peer_ = from;
    return found;
  }
  return {};
}

bool MessageQueue::is_awaited(int from) const {
  for (const WorkPtr& work : receives_) {
    if (work->peer_ == from || work->peer_ == MessageWork::kAnyRank) return true;
  }
  return false;
}

void MessageQueue::move_out(int to) {
  std::deque<WorkPtr>& queue = sends_[static_cast<size_t>(to)];
  if (queue.empty()) return;
  Pipe& out = pipe(rank_, to);
  uint64_t written = out.written.value.load(std::memory_order_relaxed);
  const uint64_t before = written;
  while (!queue.empty()) {
    MessageWork& work = *queue.front();
    const size_t room = kPipeBytes - static_cast<size_t>(written - out.read.value.load(std::memory_order_acquire));
    if (!work.head_sent_) {
      if (room < sizeof(Head)) break;
      const Head head{work.bytes_, work.tag_, static_cast<int32_t>(work.dtype_)};
      write(to, written, reinterpret_cast<const std::byte*>(&head), sizeof(head));
      written += sizeof(head);
      work.head_sent_ = true;
      continue;
    }
    const size_t count = std::min(room, work.bytes_ - work.moved_);
    write(to, written, work.data_ + work.moved_, count);
    written += count;
    work.moved_ += count;
    if (work.moved_ < work.bytes_) break;
    complete(work, nullptr);
    queue.pop_front();
  }
  if (written == before) return;
  out.written.value.store(written, std::memory_order_release);
  bell(to).add_one();
}

void MessageQueue::move_in(int from) {
  Incoming& message = incoming_[static_cast<size_t>(from)];
  Pipe& in = pipe(from, rank_);
  uint64_t position = in.read.value.load(std::memory_order_relaxed);
  const uint64_t before = position;
  while (message.under_way || is_awaited(from)) {
    const size_t there = static_cast<size_t>(in.written.value.load(std::memory_order_acquire) - position);
    if (!message.under_way) {
      if (there < sizeof(Head)) break;
      read(from, position, reinterpret_cast<std::byte*>(&message.head), sizeof(Head));
      position += sizeof(Head);
      message.under_way = true;
      message.moved = 0;
      message.work = find_receiver(from, message.head.tag);
      const bool fits = message.work.defined() && message.work->bytes_ == message.head.bytes;
      if (!fits) message.aside.resize(message.head.bytes);
      continue;
    }
    const size_t count = std::min(there, static_cast<size_t>(message.head.bytes) - message.moved);
    std::byte* const to = message.aside.empty() && message.work.defined() ? message.work->data_ : message.aside.data();
    read(from, position, to + message.moved, count);
    position += count;
    message.moved += count;
    if (message.moved < message.head.bytes) break;
    if (!message.work.defined()) {  // asked for meanwhile?
      message.work = find_receiver(from, message.head.tag);
      if (message.work.defined()) {
        move_bytes(message.work->data_, message.aside.data(), std::min(message.work->bytes_, message.aside.size()));
      }
    }
    if (message.work.defined()) {
      deliver(from, message.head, message.work);
    } else {
      aside_[static_cast<size_t>(from)].push_back(std::move(message));
    }
    message = {};
  }
  if (position == before) return;
  in.read.value.store(position, std::memory_order_release);
  bell(from).add_one();
}

void MessageQueue::move_all() {
  if (num_queued_ == 0) return;
  const size_t before = num_queued_;
  for (int rank = 0; rank < size_; ++rank) {
    move_out(rank);
    move_in(rank);
  }
  if (num_queued_ != before) bell(rank_).add_one();  // other threads of this rank may wait for them
}

void MessageQueue::add(WorkPtr work) {
  team_->members().check_usable();
  const Locked lock(*this);
  work->announced_ = true;
  something_queued();
  ++num_queued_;
  if (work->is_send()) {
    sends_[static_cast<size_t>(work->peer_)].push_back(std::move(work));
    return move_all();
  }
  // One that was kept aside comes first.
  for (int from = 0; from < size_; ++from) {
    if (work->peer_ != from && work->peer_ != MessageWork::kAnyRank) continue;
    auto& aside = aside_[static_cast<size_t>(from)];
    for (auto it = aside.begin(); it != aside.end(); ++it) {
      if (it->head.tag != work->tag_) continue;
      work->peer_ = from;
      move_bytes(work->data_, it->aside.data(), std::min(work->bytes_, it->aside.size()));
      deliver(from, it->head, work);
      aside.erase(it);
      return;
    }
  }
  receives_.push_back(std::move(work));
  move_all();
}

void MessageQueue::check_alive(const MessageWork& work) const {
  const Members& members = team_->members();
  const std::string text = work.text(members);
  if (work.peer_ != MessageWork::kAnyRank) return work.peer_ == rank_ ? void() : members.check_alive(work.peer_, text);
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    try {
      return members.check_alive(rank, text);
    } catch (const Error&) {
      if (rank + (rank_ == size_ - 1 ? 2 : 1) >= size_) throw;  // it was the last that could send
    }
  }
}

void MessageQueue::fail_all(const std::exception_ptr& error) noexcept {
  for (auto& queue : sends_) {
    for (const WorkPtr& work : queue) complete(*work, error);
    queue.clear();
  }
  for (const WorkPtr& work : receives_) complete(*work, error);
  receives_.clear();
  for (Incoming& message : incoming_) {
    if (message.work.defined()) complete(*message.work, error);
    message = {};
  }
  bell(rank_).add_one();
}

void MessageQueue::finish(MessageWork& work, std::chrono::milliseconds timeout) {
  Members& members = team_->members();
  const bool waiters_own = timeout.count() > 0;
  if (!waiters_own) timeout = members.timeout();
  const auto start = Clock::now();
  const bool crowded = members.crowded();
  auto next_check = start + kCheckEvery;
  auto spin_until = start + (crowded ? std::chrono::microseconds(0) : kSpin);
  for (;;) {
    const uint64_t seen = bell(rank_).value.load(std::memory_order_seq_cst);
    {
      const Locked lock(*this);
      move_all();
    }
    if (work.isCompleted()) return;
    do {
      for (int turn = 0; turn < 32 && bell(rank_).value.load(std::memory_order_acquire) == seen; ++turn) {
        pause_a_moment(crowded);
      }
    } while (bell(rank_).value.load(std::memory_order_acquire) == seen && Clock::now() < spin_until);
    if (bell(rank_).value.load(std::memory_order_acquire) == seen) bell(rank_).sleep(seen, kCheckEvery);
    const auto now = Clock::now();
    spin_until = now + (crowded ? std::chrono::microseconds(0) : kSpin);
    if (now < next_check) continue;
    next_check = now + kCheckEvery;
    const Locked lock(*this);
    FSDP2_CHECK(!waiters_own || work.isCompleted() || now - start < timeout, kTimeout, "[shm] a wait for ",
                work.text(members), " ended after ", timeout.count(),
                " ms; the operation goes on: wait() for it again");
    try {
      check_alive(work);
      FSDP2_CHECK(now - start < timeout, kTimeout, "[shm] ", work.text(members), " timed out after ", timeout.count(),
                  " ms: the other side did not come; check that every send has its recv, or raise "
                  "ProcessGroupOptions::timeout");
    } catch (const Error& error) {
      move_all();  // what came before the other side left
      if (work.isCompleted()) return;
      members.fail(error.what_without_backtrace());
      fail_all(std::current_exception());
    }
  }
}

void MessageQueue::cancel() noexcept {
  const Locked lock(*this);
  fail_all(std::make_exception_ptr(
      Error(ErrorCode::kCancelled, "[shm] the group was destroyed before this message was through")));
}

bool MessageQueue::stands_still() {
  const std::lock_guard lock(mutex_);
  return num_queued_ != 0;
}

void MessageQueue::catch_up() noexcept {
  for (;;) {
    WorkPtr work;
    {
      const std::lock_guard lock(mutex_);
      for (auto& queue : sends_) {
        if (!queue.empty()) work = queue.front();
      }
      if (!receives_.empty()) work = receives_.front();
      for (Incoming& message : incoming_) {
        if (message.work.defined()) work = message.work;
      }
    }
    if (!work.defined()) return;
    constexpr auto kNoLimit = std::chrono::hours(24 * 365);
    finish(*work, kNoLimit);
  }
}

}  // namespace fsdp2::detail::shm
