#pragma once

namespace fsdp2::tool {

/// One rank of the measurement that `fsdp2 doctor` starts through `fsdp2 run`: times collectives over each CPU backend.
/// Rank 0 prints a line of JSON for each: {"backend", "latency_us", "all_gather_gb_s", "reduce_scatter_gb_s"}, or
/// {"backend", "error"} where a backend cannot be had. Returns the exit code. Throws fsdp2::Error.
int measure_collectives();

}  // namespace fsdp2::tool
