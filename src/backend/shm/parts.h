#pragma once

// Where the bytes of a collective lie in this rank's tensors.

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace fsdp2::detail::shm {

/// The same piece of every rank's part: evenly spaced, or where a table says.
struct Piece {
  std::byte* data = nullptr;
  size_t bytes = 0;      // of one rank
  ptrdiff_t stride = 0;  // to the next rank
  c10::SmallVector<std::byte*, 0> table = {};

  std::byte* of(int rank) const { return table.empty() ? data + stride * rank : table[static_cast<size_t>(rank)]; }
};

/// One part per rank, each of which is the row of its pieces (one tensor, or the tensors of a coalesced call).
class Parts {
 public:
  void add(Piece piece) {
    bytes_ += piece.bytes;
    pieces_.push_back(std::move(piece));
  }
  size_t bytes() const { return bytes_; }  // of one part
  const Piece& piece(size_t i) const { return pieces_[i]; }

  /// visit(address, position, bytes) for [offset, offset + bytes) of the part; `position` counts from `offset`.
  template <class Visit>
  void walk(int rank, size_t offset, size_t bytes, Visit&& visit) const {
    walk_both(*this, rank, rank, offset, bytes,
              [&](std::byte* at, std::byte*, size_t position, size_t count) { visit(at, position, count); });
  }
  /// The same over two Parts of equal pieces.
  template <class Visit>
  void walk_both(const Parts& other, int rank, int other_rank, size_t offset, size_t bytes, Visit&& visit) const {
    size_t begin = 0, position = 0;
    for (size_t i = 0; i < pieces_.size() && position < bytes; ++i) {
      const Piece& piece = pieces_[i];
      const size_t skip = offset + position - begin;  // in this piece
      if (skip < piece.bytes) {
        const size_t count = std::min(piece.bytes - skip, bytes - position);
        visit(piece.of(rank) + skip, other.pieces_[i].of(other_rank) + skip, position, count);
        position += count;
      }
      begin += piece.bytes;
    }
  }

 private:
  c10::SmallVector<Piece, 1> pieces_;
  size_t bytes_ = 0;
};

}  // namespace fsdp2::detail::shm
