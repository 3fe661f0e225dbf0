// Interfaces, and which of them ranks would talk over.

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <map>
#include <optional>
#include <thread>

#include <fsdp2/error.h>

#include "checkpoint/text.h"
#include "doctor/topic.h"

namespace fsdp2::tool {
namespace {

constexpr auto kResolveTimeout = std::chrono::seconds(3);

struct Interface {
  bool up = false, loopback = false;
  std::vector<std::string> addresses;
};

std::string numeric(const sockaddr* address) {
  std::array<char, NI_MAXHOST> text{};
  const socklen_t size = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  return getnameinfo(address, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0 ? text.data() : "";
}

bool is_internet(const sockaddr* address) {
  return address != nullptr && (address->sa_family == AF_INET || address->sa_family == AF_INET6);
}

std::map<std::string, Interface> interfaces() {
  ifaddrs* list = nullptr;
  FSDP2_CHECK(getifaddrs(&list) == 0, kIo, "[doctor] cannot list the network interfaces: ", std::strerror(errno));
  std::map<std::string, Interface> out;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    Interface& one = out[entry->ifa_name];
    one.up = (entry->ifa_flags & IFF_UP) != 0;
    one.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    if (is_internet(entry->ifa_addr)) one.addresses.push_back(numeric(entry->ifa_addr));
  }
  freeifaddrs(list);
  return out;
}

struct Resolved {
  std::vector<std::string> addresses;
  std::string error;
};

/// A name server that does not answer must not hold up the report: then the thread ends later, or with the program.
Resolved resolve(const std::string& name) {
  auto promise = std::make_shared<std::promise<Resolved>>();
  auto future = promise->get_future();
  std::thread([promise, name] {
    Resolved out;
    addrinfo hints{}, *list = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int error = getaddrinfo(name.c_str(), nullptr, &hints, &list); error != 0) {
      out.error = gai_strerror(error);
    } else {
      for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
        if (is_internet(entry->ai_addr)) out.addresses.push_back(numeric(entry->ai_addr));
      }
      freeaddrinfo(list);
    }
    promise->set_value(out);
  }).detach();
  if (future.wait_for(kResolveTimeout) == std::future_status::ready) return future.get();
  return {{}, "no answer within " + std::to_string(kResolveTimeout.count()) + " s"};
}

bool is_loopback(const std::string& address) { return address.rfind("127.", 0) == 0 || address == "::1"; }

/// The interface that owns one of `addresses`; "" where none does.
std::string owner(const std::map<std::string, Interface>& all, const std::vector<std::string>& addresses) {
  for (const std::string& address : addresses) {
    for (const auto& [name, one] : all) {
      for (const std::string& own : one.addresses) {
        if (own == address || (one.loopback && is_loopback(address))) return name;
      }
    }
  }
  return "";
}

void check_chosen(const std::map<std::string, Interface>& all, const Resolved& host, const std::string& host_name,
                  const std::string& outside, Topic& topic) {
  const char* set = std::getenv("GLOO_SOCKET_IFNAME");
  if (set != nullptr && set[0] != '\0') {
    topic.fact("between_hosts", set, "between hosts", std::string(set) + " (GLOO_SOCKET_IFNAME)");
    const auto found = all.find(set);
    if (found == all.end() || !found->second.up || found->second.addresses.empty()) {
      std::string names;
      for (const auto& [name, one] : all) {
        if (one.up && !one.addresses.empty()) names += (names.empty() ? "" : ", ") + name;
      }
      topic.find(Severity::kError, "gloo-interface",
                 std::string("GLOO_SOCKET_IFNAME is ") + set + ", which " +
                     (found == all.end() ? "does not exist"
                      : found->second.up ? "has no address"
                                         : "is down"),
                 "set it to one of: " + names);
    }
    return;
  }
  const std::string name = owner(all, host.addresses);
  topic.fact("between_hosts", name.empty() ? Json(nullptr) : Json(name), "between hosts",
             name.empty() ? "unknown" : name + " (by the host name)");
  const std::string fix = outside.empty() ? "bring an interface up if the job spans several hosts"
                                          : "for a job over several hosts export GLOO_SOCKET_IFNAME=" + outside +
                                                ", or give the host name its address in /etc/hosts";
  if (!host.error.empty()) {
    topic.find(Severity::kWarning, "host-name", "the host name " + host_name + " does not resolve: " + host.error, fix);
  } else if (outside.empty()) {
    topic.find(Severity::kNote, "loopback-only",
               "there is no network interface but loopback: ranks can be on this host only", fix);
  } else if (!name.empty() && all.at(name).loopback) {
    topic.find(Severity::kNote, "host-name-loopback",
               "the host name " + host_name + " stands for " + host.addresses.front() +
                   ": in a job over several hosts Gloo would listen there, where no other host reaches it",
               fix);
  }
}

}  // namespace

void check_network(const DoctorOptions&, Topic& topic) {
  const std::map<std::string, Interface> all = interfaces();
  Json list = Json::array();
  std::string outside;
  bool loopback = false;
  for (const auto& [name, one] : all) {
    list.push_back({{"name", name}, {"up", one.up}, {"loopback", one.loopback}, {"addresses", one.addresses}});
    const bool usable = one.up && !one.addresses.empty();
    if (usable && one.loopback) loopback = true;
    if (usable && !one.loopback && outside.empty()) outside = name;
    if (usable) topic.fact("interfaces", list, name, list_text(one.addresses, 8));
  }
  topic.fact("interfaces", list);
  if (!loopback) {
    topic.find(Severity::kError, "no-loopback",
               "the loopback interface is down or has no address: ranks of one host meet there",
               "ip link set lo up (in a container: start it with a network namespace that has lo)");
  }

  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  const Resolved host = resolve(name.data());
  topic.fact("host_name", name.data());
  topic.fact("host_addresses", host.addresses, "host name",
             std::string(name.data()) + ": " + (host.error.empty() ? list_text(host.addresses, 8) : host.error));
  topic.fact("on_one_host", "127.0.0.1");
  check_chosen(all, host, name.data(), outside, topic);

  const char* master = std::getenv("MASTER_ADDR");
  if (master == nullptr || master[0] == '\0') return;
  const Resolved found = resolve(master);
  topic.fact("master_addresses", found.addresses, "MASTER_ADDR",
             std::string(master) + ": " + (found.error.empty() ? list_text(found.addresses, 8) : found.error));
  if (!found.error.empty()) {
    topic.find(Severity::kError, "master-addr",
               std::string("MASTER_ADDR is ") + master + ", which does not resolve: " + found.error,
               "set it to the name or address of the machine of rank 0, as all others see it");
  }
}

}  // namespace fsdp2::tool
