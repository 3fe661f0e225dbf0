#include "dcp/whole_tensors.h"

#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include <algorithm>
#include <map>
#include <optional>
#include <sstream>

#include "dcp/exchange.h"
#include "dcp/local_parts.h"
#include "dcp/staging_buffer.h"
#include "dcp/value_rep.h"
#include "process/collectives.h"
#include "process/world.h"
#include "tensor/dtensor_spec.h"
#include "tensor/redistribute.h"
#include "torch_compat.h"

namespace fsdp2::dcp::detail {

using fsdp2::detail::BelowDTensor;
using fsdp2::detail::Box;
using fsdp2::detail::DTensorLayout;
using fsdp2::detail::DTensorSpec;
using fsdp2::detail::spec_of;

void each_tensor(Value& value, const std::string& name, const std::function<void(const std::string&, Value&)>& visit) {
  const auto visit_dict = [&](StateDict& dict) {
    for (auto& [key, item] : dict) each_tensor(item, name.empty() ? key : name + "." + key, visit);
  };
  if (value.kind() == Kind::Tensor) {
    visit(name, value);
  } else if (value.kind() == Kind::Dict) {
    visit_dict(std::get<StateDict>(ValueAccess::mutable_rep(value)->content));
  } else if (value.kind() == Kind::List) {
    size_t index = 0;
    for (Value& item : ValueAccess::mutable_list(value)) {
      each_tensor(item, name + "." + std::to_string(index++), visit);
    }
  }
}

namespace {

std::vector<int64_t> ranks_of(const DeviceMesh& mesh) {
  const at::Tensor ranks = mesh.ranks().contiguous();
  const auto* data = ranks.const_data_ptr<int64_t>();
  return {data, data + ranks.numel()};
}

// Note [All ranks gather the same tensors]
// Gathering is one collective after the other, so ranks whose dicts differ would hang or mix up tensors. Before the
// first one, every rank tells the others a hash of what it holds on each mesh; where hashes differ, the lists
// themselves are exchanged and the first difference is named.

/// The distributed tensors of a dict on one mesh, a line for each.
struct MeshList {
  DeviceMesh mesh;
  std::vector<int64_t> ranks;
  std::string lines;
};

std::vector<MeshList> lists_by_mesh(Value& state) {
  std::vector<MeshList> lists;
  each_tensor(state, "", [&](const std::string& name, Value& value) {
    const DTensorSpec* spec = spec_of(value.tensor());
    if (spec == nullptr) return;
    FSDP2_CHECK(!spec->has_partial(), kInvalidArgument, "[dcp] ", name, " has the placements ",
                to_string(spec->placements), ": its values are not summed up yet; redistribute it first");
    auto list = std::find_if(lists.begin(), lists.end(), [&](const MeshList& item) { return item.mesh == spec->mesh; });
    if (list == lists.end()) list = lists.insert(list, MeshList{spec->mesh, ranks_of(spec->mesh), {}});
    list->lines += c10::str(name, " ", c10::IntArrayRef(spec->sizes), " ", value.tensor().scalar_type(), " ",
                            to_string(spec->placements), "\n");
  });
  return lists;
}

std::string hashes_of(const std::vector<MeshList>& lists) {
  // Meshes of equal ranks but other shapes are told apart by the placements in the lines.
  std::map<std::vector<int64_t>, size_t> hashes;
  for (const MeshList& list : lists) {
    size_t& hash = hashes[list.ranks];
    hash = hash * 1000003 + std::hash<std::string>()(list.lines);
  }
  ByteWriter out;
  for (const auto& [ranks, hash] : hashes) {
    out.numbers(ranks);
    out.number(uint64_t{hash});
  }
  return out.take();
}

/// Two ranks that hold different tensors on a mesh of these ranks.
struct Difference {
  size_t a, b;
  std::vector<int64_t> ranks;
};

/// The same on every rank, because all look at the same answers.
std::optional<Difference> find_difference(const std::vector<std::string>& answers, const ProcessGroup& group) {
  if (answers.size() == 1) return std::nullopt;
  const std::vector<int> members = get_process_group_ranks(group);
  std::vector<std::map<std::vector<int64_t>, uint64_t>> hashes(answers.size());
  for (size_t r = 0; r < answers.size(); ++r) {
    ByteReader in(answers[r]);
    while (!in.done()) {
      std::vector<int64_t> ranks = in.numbers();
      hashes[r].emplace(std::move(ranks), in.number<uint64_t>());
    }
  }
  std::map<std::vector<int64_t>, size_t> first_with;
  for (size_t r = 0; r < hashes.size(); ++r) {
    for (const auto& [ranks, hash] : hashes[r]) {
      const auto [first, is_new] = first_with.emplace(ranks, r);
      if (!is_new && hashes[first->second].at(ranks) != hash) return Difference{first->second, r, ranks};
    }
  }
  for (const auto& [ranks, first] : first_with) {
    for (const int64_t rank : ranks) {
      const auto member = std::find(members.begin(), members.end(), rank);
      FSDP2_CHECK(member != members.end(), kInvalidArgument, "[dcp] rank ", rank,
                  " holds a part of a DTensor and is not in StateDictOptions::group; pass a group with all ranks of "
                  "the mesh");
      const auto r = static_cast<size_t>(member - members.begin());
      if (hashes[r].count(ranks) == 0) return Difference{first, r, ranks};
    }
  }
  return std::nullopt;
}

[[noreturn]] void throw_difference(const Difference& difference, const std::vector<std::string>& lines) {
  std::istringstream a(lines[difference.a]), b(lines[difference.b]);
  std::string line_a, line_b;
  do {
    line_a.clear();
    line_b.clear();
    std::getline(a, line_a);
    std::getline(b, line_b);
  } while (line_a == line_b && (a || b));
  const auto text = [](const std::string& line) { return line.empty() ? std::string("nothing more") : line; };
  FSDP2_THROW(kInvalidArgument, "[dcp] ranks ", difference.a, " and ", difference.b,
              " hold different distributed tensors: ", text(line_a), " on the one, ", text(line_b),
              " on the other; every rank needs the same model, optimizers and options");
}

void check_same_on_all_ranks(const std::vector<MeshList>& lists, const std::vector<std::string>& answers,
                             const Exchange& exchange, const ProcessGroup& group) {
  const std::optional<Difference> difference = find_difference(answers, group);
  if (!difference) return;
  throw_difference(*difference, exchange.gather("comparing state dicts", [&] {
    std::string lines;
    for (const MeshList& list : lists) {
      if (list.ranks == difference->ranks) lines += list.lines;
    }
    return lines;
  }));
}

/// Makes DTensors whole, on all ranks or on one.
class Gatherer {
 public:
  /// `root`: the only rank (global) that gets them, on the CPU; negative = all, on the device of their parts.
  explicit Gatherer(int64_t root) : root_(root) {}

  /// Undefined on ranks that do not get it. Collective over the ranks that are needed.
  at::Tensor whole(const at::Tensor& tensor, const std::string& name) {
    const BelowDTensor below;
    const DTensorSpec& spec = *spec_of(tensor);
    const DTensorLayout& layout = *spec.layout;
    const auto mine = spec.mesh.get_coordinate();
    if (!mine || !takes_part(layout, *mine)) return {};
    const bool keep = root_ < 0 || (is_initialized() ? get_rank() : 0) == root_;
    const at::Tensor local = spec.local.detach();
    const c10::Device device = root_ < 0 ? local.device() : c10::Device(c10::kCPU);
    if (local.is_meta() || tensor.numel() == 0) {
      return keep ? at::empty(layout.sizes, local.options().device(local.is_meta() ? local.device() : device))
                  : at::Tensor();
    }
    const std::vector<int64_t> axes = layout.sharded_axes();
    if (axes.empty()) return keep ? local.clone(at::MemoryFormat::Contiguous).to(device) : at::Tensor();
    const bool small = tensor.numel() * static_cast<int64_t>(tensor.element_size()) <= kSmall;
    const c10::Device wire = transport(spec.mesh.get_group(axes[0]), local, spec.mesh);
    // Gloo gathers through a buffer as big as the result.
    const bool in_place = !wire.is_cpu() && has_equal_rows(layout, axes);
    if (!small && !in_place) return part_by_part(tensor, axes, *mine, keep, device, name);
    at::Tensor full = fsdp2::detail::gather_full(layout, local.to(wire), name);
    if (!keep) return {};
    if (full.storage().nbytes() != full.nbytes()) full = full.clone();  // without the padding
    return full.to(device);
  }

 private:
  /// Up to here one collective is worth more than the memory of its padding.
  static constexpr int64_t kSmall = 1 << 20;

  /// The gathered buffer is the tensor.
  static bool has_equal_rows(const DTensorLayout& layout, const std::vector<int64_t>& axes) {
    return axes.size() == 1 && layout.extents.empty() && layout.placements[axes[0]] == Placement(Shard{0}) &&
           layout.sizes[0] % layout.mesh.size(axes[0]) == 0;
  }

  static c10::Device transport(const ProcessGroup& group, const at::Tensor& local, const DeviceMesh& mesh) {
    const bool moves = fsdp2::detail::has_backend(*group, local.device().type());
    return moves ? local.device() : fsdp2::detail::control_device(mesh);
  }

  /// Of several replicas only that of the root gathers.
  bool takes_part(const DTensorLayout& layout, const std::vector<int64_t>& mine) const {
    if (root_ < 0) return true;
    const std::vector<int64_t> ranks = ranks_of(layout.mesh);
    const auto found = std::find(ranks.begin(), ranks.end(), root_);
    if (found == ranks.end()) return false;
    int64_t index = found - ranks.begin();
    const std::vector<int64_t> sharded = layout.sharded_axes();
    for (int64_t axis = layout.mesh.ndim() - 1; axis >= 0; --axis) {
      const int64_t of_root = index % layout.mesh.size(axis);
      index /= layout.mesh.size(axis);
      const bool is_sharded = std::find(sharded.begin(), sharded.end(), axis) != sharded.end();
      if (!is_sharded && of_root != mine[axis]) return false;
    }
    return true;
  }

  /// Beyond the result, one part at a time.
  at::Tensor part_by_part(const at::Tensor& tensor, const std::vector<int64_t>& axes, const std::vector<int64_t>& mine,
                          bool keep, c10::Device device, const std::string& name) {
    const DTensorSpec& spec = *spec_of(tensor);
    const auto owners = fsdp2::detail::coordinates_over_axes(spec.mesh, axes);
    std::vector<int> ranks;
    for (const auto& owner : owners) ranks.push_back(rank_at(spec.mesh, owner));
    std::vector<int> members = ranks;
    std::sort(members.begin(), members.end());
    const ProcessGroup group = axes.size() == 1 ? spec.mesh.get_group(axes[0]) : fsdp2::detail::shared_group(members);
    const c10::Device wire = transport(group, spec.local, spec.mesh);
    const auto options = spec.local.options().requires_grad(false);
    const std::vector<LocalPart> own = local_parts(tensor, name);
    const at::Tensor full = keep ? at::empty(spec.sizes, options.device(device)) : at::Tensor();
    for (size_t i = 0; i < owners.size(); ++i) {
      const int root = axes.size() == 1
                           ? static_cast<int>(owners[i][axes[0]])
                           : static_cast<int>(std::find(members.begin(), members.end(), ranks[i]) - members.begin());
      size_t next = 0;
      for (const Box& box : spec.layout->chunks(owners[i])) {
        if (box.numel() == 0) continue;
        at::Tensor place = full;
        for (int64_t d = 0; keep && d < tensor.dim(); ++d) place = place.narrow(d, box.offsets[d], box.sizes[d]);
        const bool direct = keep && place.is_contiguous() && place.device() == wire;
        const bool is_mine = owners[i] == mine;
        at::Tensor buffer = direct ? place : staging_.get(box.sizes, tensor.scalar_type(), wire);
        if (is_mine) buffer.copy_(own[next++].data);
        fsdp2::detail::broadcast_from(buffer, root, group, {name.c_str()}).wait();
        if (keep && !direct) place.copy_(buffer);
      }
    }
    return full;
  }

  static int rank_at(const DeviceMesh& mesh, const std::vector<int64_t>& coordinate) {
    int64_t index = 0;
    for (int64_t axis = 0; axis < mesh.ndim(); ++axis) index = index * mesh.size(axis) + coordinate[axis];
    return static_cast<int>(ranks_of(mesh)[index]);
  }

  int64_t root_;
  StagingBuffer staging_;
};

void offload(Value& state) {
  each_tensor(state, "", [](const std::string&, Value& value) {
    const BelowDTensor below;
    const at::Tensor tensor = value.tensor();
    const DTensorSpec* spec = spec_of(tensor);
    const at::Tensor& data = spec ? spec->local : tensor;
    if (data.is_cpu() || data.is_meta()) return;
    const at::Tensor moved = data.detach().cpu();
    value = spec ? fsdp2::detail::make_dtensor_like(*spec, moved) : moved;
  });
}

}  // namespace

StateDict in_requested_form(const StateDictOptions& options, const std::function<StateDict()>& collect) {
  if (!options.full_state_dict) {
    Value state = collect();
    if (options.cpu_offload) offload(state);
    return std::as_const(state).dict();
  }
  const Exchange exchange(options.group);
  Value state;
  std::vector<MeshList> lists;
  const std::vector<std::string> answers = exchange.gather("collecting a state dict", [&] {
    state = collect();
    lists = lists_by_mesh(state);
    return hashes_of(lists);
  });
  check_same_on_all_ranks(lists, answers, exchange, options.group);

  const bool rank0_only = options.cpu_offload && exchange.world_size() > 1;
  // Without other ranks, all is rank 0.
  Gatherer gatherer(rank0_only ? get_process_group_ranks(options.group)[0] : -1);
  each_tensor(state, "", [&](const std::string& name, Value& value) {
    const at::Tensor tensor = value.tensor();
    if (!fsdp2::detail::is_marked(tensor)) return;
    value = nullptr;  // the part goes as soon as nobody else holds it
    const at::Tensor whole = gatherer.whole(tensor, name);
    if (whole.defined()) value = whole;
  });
  if (rank0_only && exchange.rank() != 0) return {};
  if (options.cpu_offload) offload(state);
  return std::as_const(state).dict();
}

}  // namespace fsdp2::dcp::detail
