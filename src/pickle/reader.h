#pragma once

// Note [Reading pickles of strangers]
// A pickle is a program for a stack machine that may import and call anything. This machine knows
// the data part of it (protocols 2 to 5) and turns imports, calls and objects into nodes that say
// what was asked for. Every opcode checks stack, memo and input before it acts; memory is bounded
// by a small multiple of the input; nothing recurses.

#include <string_view>

#include "pickle/graph.h"

namespace fsdp2::pickle {

struct ReadOptions {
  /// Says whether a global may occur at all; null allows every global (as a node, never as a call).
  bool (*allow_global)(std::string_view module, std::string_view name) = nullptr;
  /// BINPERSID occurs in torch.save pickles only.
  bool allow_persistent = false;
  size_t max_nodes = size_t{1} << 27;
};

/// `what` names the pickle in errors. kCorruption: not a well-formed pickle; kUnsupported: an
/// opcode or a global outside of the closed world.
Graph read(std::string_view input, std::string_view what, const ReadOptions& options = {});

}  // namespace fsdp2::pickle
