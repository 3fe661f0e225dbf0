#include "fsdp/staged_reduction.h"

#include <algorithm>
#include <cstring>

#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include "backend/shm/copy.h"
#include "backend/shm/sum.h"

namespace fsdp2::detail {

// Note [Reductions through a ring]
// On the shm backend a rank puts of its gradients what the others need into a ring that all of them map, in chunks
// small enough to stay in cache, and adds what it finds there to its own rows, which it reads where autograd left them:
// nothing else is copied, and no buffer has the size of the gradients. Chunks are numbered through all reductions of
// a process group, and one counter per rank says how many it has written, one how many it has read. What fits is
// staged when a reduction starts, so that a rank that is late delays the others only when they need its part. Sums
// are formed in the order of ranks and rounded once: equal from run to run, whatever the timing.

namespace {

constexpr size_t kSlotBytes = size_t{256} << 10;
constexpr uint64_t kSlots = 16;
constexpr size_t kPastCacheBytes = size_t{2} << 20;  // of the gradients of one reduction

}  // namespace

/// Of the first chunk of a reduction.
struct StagingRing::Header {
  uint64_t fingerprint, chunks;
  at::ScalarType dtype;
};

StagingRing::StagingRing(shm::ShmBackend& backend)
    : ranks_(backend.getSize()),
      rank_(backend.getRank()),
      memory_(backend.make_memory(static_cast<size_t>(ranks_) * kSlots * (kSlotBytes + sizeof(Header)),
                                  "the ring for gradients")),
      written_(backend.make_signals()),
      read_(backend.make_signals()) {}

std::byte* StagingRing::slot(int rank, uint64_t chunk) const {
  return memory_->data() + (static_cast<uint64_t>(rank) * kSlots + chunk % kSlots) * kSlotBytes;
}

StagingRing::Header& StagingRing::header(int rank, uint64_t chunk) const {
  auto* headers = reinterpret_cast<Header*>(memory_->data() + static_cast<uint64_t>(ranks_) * kSlots * kSlotBytes);
  return headers[static_cast<uint64_t>(rank) * kSlots + chunk % kSlots];
}

StagedReduction::StagedReduction(std::shared_ptr<StagingRing> ring, std::vector<Piece> pieces, at::ScalarType dtype,
                                 at::Tensor out, double divisor, uint64_t fingerprint, std::string label)
    : ring_(std::move(ring)),
      pieces_(std::move(pieces)),
      dtype_(dtype),
      out_(std::move(out)),
      divisor_(divisor),
      fingerprint_(fingerprint),
      label_(std::move(label)) {
  per_chunk_ = static_cast<int64_t>(kSlotBytes / out_.element_size()) / (ring_->ranks_ - 1) / 64 * 64;
  FSDP2_CHECK(per_chunk_ > 0, kUnsupported, "[fsdp] ", ring_->ranks_,
              " ranks are too many for the ring of one host; use backend cpu:gloo");
  FSDP2_CHECK(!ring_->broken_, kUsage, "[fsdp] an earlier reduction failed while others were under way; start again");
  const int64_t numel = out_.numel();
  past_cache_ = out_.nbytes() * static_cast<size_t>(ring_->ranks_) >= kPastCacheBytes;
  first_ = ring_->reserved_;
  count_ = static_cast<uint64_t>(std::max<int64_t>(1, (numel + per_chunk_ - 1) / per_chunk_));
  next_stage_ = first_;
  ring_->reserved_ += count_;
  ring_->unfinished_.push_back(this);
  // Not where an older one waits for room: chunks are written in their order.
  while (next_stage_ == ring_->staged_ && next_stage_ < first_ + count_ &&
         (next_stage_ < kSlots || ring_->read_->reached(next_stage_ - kSlots + 1))) {
    stage_next();
  }
}

StagedReduction::~StagedReduction() {
  if (done_) return;
  std::erase(ring_->unfinished_, this);  // after an error
  ring_->broken_ = true;
}

bool StagedReduction::finish() {
  while (!done_) {
    ring_->unfinished_.front()->complete();
  }
  return agreed_;
}

void StagedReduction::complete() {
  for (uint64_t index = first_; index < first_ + count_; ++index) {
    while (next_stage_ <= index) {
      if (next_stage_ >= kSlots) ring_->read_->wait(next_stage_ - kSlots + 1, label_.c_str());
      stage_next();
    }
    ring_->written_->wait(index + 1, label_.c_str());
    if (index == first_ && !ranks_agree()) {
      agreed_ = false;
      break;
    }
    consume(index);
    ring_->read_->post(index + 1);
    if (next_stage_ < first_ + count_ && (next_stage_ < kSlots || ring_->read_->reached(next_stage_ - kSlots + 1))) {
      stage_next();
    }
  }
  pieces_.clear();
  done_ = true;
  ring_->unfinished_.pop_front();
}

/// The parts of pieces that chunk `index` covers, in one rank's share.
template <class Use>
void StagedReduction::for_spans(uint64_t index, Use&& use) const {
  const int64_t begin = static_cast<int64_t>(index - first_) * per_chunk_;
  const int64_t end = std::min(begin + per_chunk_, out_.numel());
  int64_t piece_begin = 0;
  for (size_t i = 0; i < pieces_.size() && piece_begin < end; ++i) {
    const int64_t piece_end = piece_begin + pieces_[i].chunk;
    const int64_t from = std::max(begin, piece_begin), to = std::min(end, piece_end);
    if (from < to) use(pieces_[i], from - piece_begin, to - from, from - begin);
    piece_begin = piece_end;
  }
}

/// Elements of the piece that belong to `rank`.
int64_t StagedReduction::numel_of(const Piece& piece, int rank) const {
  return std::clamp<int64_t>(piece.gradient.numel() - rank * piece.chunk, 0, piece.chunk);
}

void StagedReduction::stage_next() {
  const uint64_t index = next_stage_;
  const size_t size = c10::elementSize(dtype_);
  if (index == first_) {
    StagingRing::Header& header = ring_->header(ring_->rank_, index);
    header.fingerprint = fingerprint_;
    header.chunks = count_;
    header.dtype = dtype_;
  }
  std::byte* slot = ring_->slot(ring_->rank_, index);
  for (int to = 0, place = 0; to < ring_->ranks_; ++to) {
    if (to == ring_->rank_) continue;
    std::byte* part = slot + static_cast<size_t>(place++ * per_chunk_) * size;
    for_spans(index, [&](const Piece& piece, int64_t begin, int64_t length, int64_t at) {
      const int64_t there = piece.gradient.defined() ? std::clamp<int64_t>(numel_of(piece, to) - begin, 0, length) : 0;
      if (there > 0) {
        const auto* from = static_cast<const std::byte*>(piece.gradient.const_data_ptr());
        shm::copy_bytes(part + static_cast<size_t>(at) * size,
                        from + static_cast<size_t>(to * piece.chunk + begin) * size, static_cast<size_t>(there) * size,
                        past_cache_);
      }
      std::memset(part + static_cast<size_t>(at + there) * size, 0, static_cast<size_t>(length - there) * size);
    });
  }
  ring_->written_->post(index + 1);
  ring_->staged_ = next_stage_ = index + 1;
}

void StagedReduction::consume(uint64_t index) {
  Inputs inputs;
  const int64_t base = static_cast<int64_t>(index - first_) * per_chunk_;
  const auto size_of = [this](int rank) { return c10::elementSize(dtypes_[static_cast<size_t>(rank)]); };
  for_spans(index, [&](const Piece& piece, int64_t begin, int64_t length, int64_t at) {
    const int own = ring_->rank_;
    const int64_t mine = piece.gradient.defined() ? std::clamp<int64_t>(numel_of(piece, own) - begin, 0, length) : 0;
    auto* out = static_cast<std::byte*>(out_.data_ptr()) + static_cast<size_t>(base + at) * out_.element_size();
    // Where this rank has nothing (padding, or no gradient) the others' zeros and values are all there is.
    for (const bool with_own : {true, false}) {
      const int64_t from = with_own ? 0 : mine, count = with_own ? mine : length - mine;
      if (count == 0) continue;
      inputs.clear();
      for (int rank = 0; rank < ring_->ranks_; ++rank) {
        if (rank == own) {
          if (!with_own) continue;
          inputs.emplace_back(rank, static_cast<const std::byte*>(piece.gradient.const_data_ptr()) +
                                        static_cast<size_t>(own * piece.chunk + begin + from) * size_of(rank));
        } else {
          const int place = own < rank ? own : own - 1;
          inputs.emplace_back(
              rank, ring_->slot(rank, index) + static_cast<size_t>(place * per_chunk_ + at + from) * size_of(rank));
        }
      }
      add_up(out + static_cast<size_t>(from) * out_.element_size(), inputs, count);
    }
  });
}

/// Where the ranks' dtypes differ, in that of the sum, to which each rank would have converted.
void StagedReduction::add_up(std::byte* out, const Inputs& inputs, int64_t count) const {
  at::ScalarType dtype = dtype_;
  for (const auto& [rank, data] : inputs) {
    if (dtypes_[static_cast<size_t>(rank)] != dtype_) dtype = out_.scalar_type();
  }
  c10::SmallVector<const void*, kFewRanks> addresses;
  std::vector<at::Tensor> converted;
  for (const auto& [rank, data] : inputs) {
    addresses.push_back(data);
    const at::ScalarType given = dtypes_[static_cast<size_t>(rank)];
    if (given == dtype) continue;
    converted.push_back(at::from_blob(const_cast<std::byte*>(data), {count}, at::TensorOptions(given)).to(dtype));
    addresses.back() = converted.back().const_data_ptr();
  }
  shm::sum_in_order(out, out_.scalar_type(), addresses, dtype, count, divisor_, past_cache_);
}

/// Every rank sees the same headers, and goes on behind the longest of the reductions.
bool StagedReduction::ranks_agree() {
  uint64_t chunks = 0;
  bool agree = true;
  dtypes_.clear();
  for (int rank = 0; rank < ring_->ranks_; ++rank) {
    const StagingRing::Header& header = ring_->header(rank, first_);
    chunks = std::max(chunks, header.chunks);
    agree &= header.fingerprint == fingerprint_;
    dtypes_.push_back(header.dtype);
  }
  if (agree) return true;
  ring_->reserved_ = ring_->staged_ = first_ + chunks;
  ring_->broken_ = ring_->unfinished_.size() > 1;
  ring_->written_->post(first_ + chunks);
  ring_->read_->post(first_ + chunks);
  return false;
}

std::shared_ptr<StagingRing> staging_ring_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  shm::ShmBackend* backend = shm::shm_backend_of(group);
  if (backend == nullptr || backend->getSize() == 1) return nullptr;
  if (!backend->attachment) backend->attachment = std::make_shared<StagingRing>(*backend);
  return std::static_pointer_cast<StagingRing>(backend->attachment);
}

}  // namespace fsdp2::detail
