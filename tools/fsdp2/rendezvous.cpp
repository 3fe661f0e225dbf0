#include "rendezvous.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>

#include <fsdp2/error.h>

#include "process_sweep.h"

namespace fsdp2::tool {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Away from the keys of the ranks, which live under /worker and default_pg.
std::string key(const std::string& name) { return "fsdp2_run/" + name; }
std::string key(const std::string& name, int node) { return key(name) + "/" + std::to_string(node); }

std::string first_line(const std::exception& error) {
  std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

struct Rendezvous::Store {
  c10::intrusive_ptr<c10d::TCPStore> tcp;
  void set(const std::string& name, const std::string& value) {
    tcp->set(name, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& name) {
    auto bytes = tcp->get(name);
    return {bytes.begin(), bytes.end()};
  }
};

Rendezvous::Rendezvous(const RunOptions& options)
    : store_(std::make_unique<Store>()), num_nodes_(options.num_nodes), node_rank_(options.node_rank) {
  milliseconds join_timeout(static_cast<int64_t>(options.join_timeout * 1000));
  c10d::TCPStoreOptions store_options;
  store_options.port = static_cast<uint16_t>(options.master_port);
  store_options.isServer = node_rank_ == 0;
  store_options.waitWorkers = false;
  store_options.timeout = join_timeout;
  try {
    store_->tcp = c10::make_intrusive<c10d::TCPStore>(options.master_addr, store_options);
  } catch (const std::exception& error) {
    if (node_rank_ == 0) {
      FSDP2_THROW(kIo, "[run] cannot host the store on port ", options.master_port, " (address ", options.master_addr,
                  "): ", first_line(error),
                  options.num_nodes == 1 ? "; leave --master-port out to get a free port"
                                         : "; give every node another --master-port");
    }
    FSDP2_THROW(kTimeout, "[run] node ", node_rank_, " cannot reach node 0 at ", options.master_addr, ":",
                options.master_port, " within ", options.join_timeout, " s: ", first_line(error),
                "; start fsdp2 run there too, and check address, port and firewall");
  }
  if (num_nodes_ == 1) {
    world_size_ = options.num_local_ranks;
    run_id_ = options.run_id.empty() ? make_unique_id() : options.run_id;
    return;
  }

  try {
    if (node_rank_ == 0) store_->set(key("run_id"), options.run_id.empty() ? make_unique_id() : options.run_id);
    FSDP2_CHECK(store_->tcp->add(key("joined", node_rank_), 1) == 1, kInvalidArgument, "[run] node rank ", node_rank_,
                " joined twice; give each node another --node-rank, 0 to ", num_nodes_ - 1);
    store_->set(key("ranks", node_rank_), std::to_string(num_nodes_) + " " + std::to_string(options.num_local_ranks));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    FSDP2_THROW(kPeerFailed, "[run] node 0 went away while the nodes joined: ", first_line(error));
  }
  auto deadline = Clock::now() + join_timeout;
  for (int node = 0; node < num_nodes_; ++node) {
    std::string text;
    try {
      auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
      store_->tcp->wait({key("ranks", node)}, std::max(left, milliseconds(1)));
      text = store_->get(key("ranks", node));
    } catch (const std::exception& error) {
      FSDP2_THROW(kTimeout, "[run] node ", node, " of ", num_nodes_, " did not come within ", options.join_timeout,
                  " s; start fsdp2 run there with --node-rank ", node, " (", first_line(error), ")");
    }
    auto space = text.find(' ');
    int their_nodes = std::stoi(text), their_ranks = std::stoi(text.substr(space));
    FSDP2_CHECK(their_nodes == num_nodes_, kInvalidArgument, "[run] node ", node, " was started with --nnodes ",
                their_nodes, ", node ", node_rank_, " with ", num_nodes_, "; give the same number everywhere");
    if (node < node_rank_) first_rank_ += their_ranks;
    world_size_ += their_ranks;
  }
  run_id_ = store_->get(key("run_id"));
}

Rendezvous::~Rendezvous() = default;

int Rendezvous::port() const { return store_->tcp->getPort(); }

void Rendezvous::publish_failure(const std::string& cause) noexcept {
  if (num_nodes_ == 1) return;
  try {
    if (store_->tcp->add(key("failures"), 1) == 1) store_->set(key("failure"), cause);
  } catch (const std::exception&) {
    // Node 0 is gone; the other nodes see that for themselves.
  }
}

std::optional<std::string> Rendezvous::failure_elsewhere() noexcept {
  if (num_nodes_ == 1) return std::nullopt;
  try {
    if (!store_->tcp->check({key("failure")})) return std::nullopt;
    return store_->get(key("failure"));
  } catch (const std::exception& error) {
    return "the launcher of node 0 cannot be reached any more: " + first_line(error);
  }
}

void Rendezvous::leave(double seconds) noexcept {
  if (num_nodes_ == 1) return;
  try {
    store_->set(key("done", node_rank_), "1");
    if (node_rank_ != 0) return;
    auto deadline = Clock::now() + milliseconds(static_cast<int64_t>(seconds * 1000));
    for (int node = 1; node < num_nodes_; ++node) {
      auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
      store_->tcp->wait({key("done", node)}, std::max(left, milliseconds(1)));
    }
  } catch (const std::exception&) {
    // A node that never says so has ended in another way; there is nothing left to wait for.
  }
}

}  // namespace fsdp2::tool
