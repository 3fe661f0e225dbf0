#include "dcp/save_items.h"

#include <fsdp2/error.h>

#include "dcp/item.h"
#include "dcp/local_parts.h"
#include "dcp/scalar_types.h"

namespace fsdp2::dcp::detail {

std::vector<SaveItem> make_save_items(StateDict& state, int rank) {
  std::vector<SaveItem> items;
  for (Leaf& leaf : flatten(state, {.rank = rank})) {
    SaveItem item{std::move(leaf.fqn), std::move(leaf.path), {}, {}, {}};
    if (leaf.value->kind() == Kind::Tensor) {
      const at::Tensor& tensor = leaf.value->tensor();
      item.tensor = TensorEntry{tensor.scalar_type(), tensor.sizes().vec(), {}};
      for (LocalPart& part : local_parts(tensor, item.fqn)) {
        check_storable(part.data, item.fqn);
        item.tensor->chunks.push_back(std::move(part.box));
        item.data.push_back(std::move(part.data));
      }
      dtype_name(tensor.scalar_type());  // also where this rank has no part
    } else {
      item.value = pickle_value(*leaf.value, item.fqn);
      FSDP2_CHECK(item.value.pickle.size() < kMaxValueBytes, kUnsupported, "[dcp] ", item.fqn, " is a value of ",
                  item.value.pickle.size(), " bytes; at most ", kMaxValueBytes,
                  " are read again: save it as a tensor of bytes");
    }
    items.push_back(std::move(item));
  }
  return items;
}

}  // namespace fsdp2::dcp::detail
