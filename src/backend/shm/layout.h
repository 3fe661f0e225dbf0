#pragma once

// Where things lie in the memory that a group shares from its beginning.

#include <cstddef>

#include "backend/shm/members.h"
#include "backend/shm/signals.h"

namespace fsdp2::detail::shm {

struct Layout {
  static constexpr size_t kPage = 4096;
  static constexpr size_t kSlots = 4;               // chunks of a rank that may be under way
  static constexpr size_t kChunkBytes = 256 << 10;  // four of them stay in a second-level cache
  static constexpr size_t kHeaderBytes = 128;
  static constexpr size_t kMessageBytes = 256 << 10;  // of one rank for another, on the way

  explicit Layout(int size) : size(static_cast<size_t>(size)) {
    const auto take = [this](size_t bytes, size_t alignment) {
      const size_t begin = (this->bytes + alignment - 1) / alignment * alignment;
      this->bytes = begin + bytes;
      return begin;
    };
    states = take(this->size * sizeof(MemberState), kPage);
    steps = take(Signals::bytes_for(size), kPage);
    produced = take(Signals::bytes_for(size), kHeaderBytes);
    consumed = take(Signals::bytes_for(size), kHeaderBytes);
    bells = take(Signals::bytes_for(size), kHeaderBytes);
    headers = take(this->size * kSlots * kHeaderBytes, kHeaderBytes);
    chunks = take(this->size * kSlots * kChunkBytes, kPage);
    busy_bytes = this->bytes;
    messages = take(this->size * this->size * (kPage + kMessageBytes), kPage);
    this->bytes = (this->bytes + kPage - 1) / kPage * kPage;
  }

  /// What a rank can put into one chunk for each rank.
  static size_t unit(int size) { return kChunkBytes / static_cast<size_t>(size) / 64 * 64; }
  size_t header(int rank, size_t slot) const {
    return headers + (static_cast<size_t>(rank) * kSlots + slot) * kHeaderBytes;
  }
  size_t chunk(int rank, size_t slot) const {
    return chunks + (static_cast<size_t>(rank) * kSlots + slot) * kChunkBytes;
  }
  size_t message(int from, int to) const {
    return messages + (static_cast<size_t>(from) * size + static_cast<size_t>(to)) * (kPage + kMessageBytes);
  }

  size_t size;
  size_t bytes = 0;
  size_t busy_bytes = 0;  // what every group needs; messages take memory when they are used
  size_t states = 0, steps = 0, produced = 0, consumed = 0, bells = 0, headers = 0, chunks = 0, messages = 0;
};

}  // namespace fsdp2::detail::shm
