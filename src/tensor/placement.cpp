#include <fsdp2/tensor/placement.h>

namespace fsdp2 {
namespace {

const char* reduce_op_name(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "avg";
    case c10d::ReduceOp::PRODUCT:
      return "product";
    case c10d::ReduceOp::MIN:
      return "min";
    case c10d::ReduceOp::MAX:
      return "max";
    default:
      return "other";
  }
}

struct Printer {
  std::string operator()(const Replicate&) const { return "Replicate"; }
  std::string operator()(const Shard& shard) const { return "Shard(" + std::to_string(shard.dim) + ")"; }
  std::string operator()(const Partial& partial) const {
    return std::string("Partial(") + reduce_op_name(partial.op) + ")";
  }
  std::string operator()(const StridedShard& shard) const {
    return "StridedShard(" + std::to_string(shard.dim) + ", " + std::to_string(shard.split_factor) + ")";
  }
};

}  // namespace

std::string to_string(const Placement& placement) { return std::visit(Printer{}, placement); }

std::string to_string(const std::vector<Placement>& placements) {
  std::string text = "[";
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    text += (axis == 0 ? "" : ", ") + to_string(placements[axis]);
  }
  return text + "]";
}

}  // namespace fsdp2
