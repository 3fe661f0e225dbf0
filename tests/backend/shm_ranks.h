#pragma once

// Ranks that are connected by shm.

#include <fsdp2/fsdp2.h>

#include "support/ranks.h"

namespace fsdp2::testing {

/// Runs `body` on `num_ranks` processes in a job of backend "shm"; they leave it after the body.
inline ::testing::AssertionResult shm_ranks(int num_ranks, const std::function<void(int rank)>& body,
                                            std::chrono::milliseconds timeout = std::chrono::seconds(60),
                                            const std::string& backend = "shm") {
  const TempDir folder;
  return run_ranks(num_ranks,
                   [&](int rank) {
                     init_process_group({.backend = backend,
                                         .init_method = "file://" + folder.path() + "/store",
                                         .timeout = timeout,
                                         .rank = rank,
                                         .world_size = num_ranks});
                     body(rank);
                     destroy_process_group();
                   },
                   {.init_process_group = false});
}

}  // namespace fsdp2::testing
