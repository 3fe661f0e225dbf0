#pragma once

// Collectives that exchange nothing: local copies of the same bytes.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

namespace bench {

struct StubAllGather : fsdp2::AllGather {
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return torch::empty(sizes, options);
  }
  c10::intrusive_ptr<c10d::Work> operator()(at::Tensor& out, const at::Tensor& in,
                                            const fsdp2::ProcessGroup& group) override {
    const at::Tensor rows = out.view({group->getSize(), -1});
    for (int64_t i = 0; i < rows.size(0); ++i) {
      const at::Tensor row = rows[i];
      if (row.data_ptr() != in.data_ptr()) row.copy_(in.view({-1}));
    }
    return {};
  }
};

struct StubReduceScatter : fsdp2::ReduceScatter {
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return torch::empty(sizes, options);
  }
  c10::intrusive_ptr<c10d::Work> operator()(at::Tensor& out, const at::Tensor& in, const fsdp2::ProcessGroup& group,
                                            fsdp2::ReduceOp) override {
    out.view({-1}).copy_(in.view({group->getSize(), -1})[group->getRank()]);
    return {};
  }
};

}  // namespace bench
