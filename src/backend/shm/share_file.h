#pragma once

// Hands an open file to other processes of this host and user, over a socket without a name in the file system.

#include <chrono>
#include <string>

#include "backend/shm/shared_memory.h"

namespace fsdp2::detail::shm {

/// Listens under `name`, a text that nobody else uses.
class FileServer {
 public:
  explicit FileServer(const std::string& name);
  /// Gives `file` to one process that asks; false where none came within the time.
  bool serve(const File& file, std::chrono::milliseconds time);

 private:
  File listener_;
};

/// Asks the server `name`, which must be listening already.
File ask_for_file(const std::string& name, std::chrono::milliseconds timeout);

}  // namespace fsdp2::detail::shm
