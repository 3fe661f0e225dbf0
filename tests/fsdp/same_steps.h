#pragma once

// A sharded model and its whole twin, trained side by side.

#include <string>

#include "fsdp/parity.h"

namespace fsdp2::testing {

constexpr int64_t kDim = 4;  // of a row; four ranks divide every size

/// Adam steps of both; `loss_of(sharded, rows)` is a sum over the rows.
template <class Loss>
void expect_same_steps(const torch::nn::Module& model, const torch::nn::Module& reference, int rank, int steps,
                       const std::string& where, Loss&& loss_of) {
  const int size = fsdp2::get_world_size();
  torch::optim::Adam optimizer(model.parameters(), 1e-2), expected(reference.parameters(), 1e-2);
  for (int step = 0; step < steps; ++step) {
    const std::string at = where + " step " + std::to_string(step);
    const Tensor all = torch::randn({2 * size, kDim}, torch::kDouble);
    Tensor loss = loss_of(true, rows_of(all, rank), step);
    const Tensor whole_loss = loss_of(false, all, step);
    loss.backward();
    (whole_loss / size).backward();
    Tensor sum = loss.detach().clone();
    fsdp2::all_reduce(sum);
    EXPECT_LE(max_difference(sum, whole_loss.detach()), 1e-9) << at;
    expect_same_gradients(model, reference, at);
    optimizer.step();
    expected.step();
    expect_same_values(model, reference, at);
    optimizer.zero_grad(step % 2 == 0);
    expected.zero_grad(step % 2 == 0);
  }
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0) << where;
}

}  // namespace fsdp2::testing
