#include "backend/shm/share_file.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <limits>

#include <fsdp2/error.h>

namespace fsdp2::detail::shm {

namespace {

struct Address {
  sockaddr_un name{};
  socklen_t bytes = 0;
};

// A leading zero byte makes the name abstract: it lives in the network namespace and dies with the socket.
Address abstract_address(const std::string& name) {
  Address address;
  address.name.sun_family = AF_UNIX;
  FSDP2_CHECK(name.size() + 1 <= sizeof(address.name.sun_path), kInvalidArgument, "[shm] socket name too long: ", name);
  std::memcpy(address.name.sun_path + 1, name.data(), name.size());
  address.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

const sockaddr* as_sockaddr(const Address& address) { return reinterpret_cast<const sockaddr*>(&address.name); }

/// What `call` gives when no signal handler interrupts it.
template <class Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

/// Whether there is something to read from `fd` within the time. Handlers of signals cut poll() short, whatever they
/// were installed with.
bool becomes_readable(int fd, std::chrono::milliseconds time) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + time;
  pollfd waiting{fd, POLLIN, 0};
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    const int ready =
        ::poll(&waiting, 1, static_cast<int>(std::clamp<int64_t>(left, 0, std::numeric_limits<int>::max())));
    if (ready > 0) return true;
    if ((ready < 0 && errno != EINTR) || Clock::now() >= deadline) return false;
  }
}

/// Both ends look: the names are secret, but not their use by other users of the host.
bool is_same_user(int fd) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == ::geteuid();
}

/// One byte with room for a file descriptor beside it. Points into itself.
struct FileMessage {
  FileMessage() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
  }
  FileMessage(const FileMessage&) = delete;

  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
};

}  // namespace

FileServer::FileServer(const std::string& name) : listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const Address address = abstract_address(name);
  FSDP2_CHECK(listener_.is_open() && ::bind(listener_.fd(), as_sockaddr(address), address.bytes) == 0 &&
                  ::listen(listener_.fd(), SOMAXCONN) == 0,
              kIo, "[shm] listening on a socket that hands shared memory to the other ranks: ", std::strerror(errno));
}

bool FileServer::serve(const File& file, std::chrono::milliseconds time) {
  if (!becomes_readable(listener_.fd(), time)) return false;
  const File peer(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC));
  FSDP2_CHECK(peer.is_open() || errno == ECONNABORTED || errno == EINTR, kIo,
              "[shm] accepting a rank that wants to map shared memory: ", std::strerror(errno), "; see ulimit -n");
  if (!peer.is_open() || !is_same_user(peer.fd())) return false;
  FileMessage sent;
  cmsghdr* const header = CMSG_FIRSTHDR(&sent.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = file.fd();
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  return uninterrupted([&] { return ::sendmsg(peer.fd(), &sent.message, MSG_NOSIGNAL); }) == 1;
}

File ask_for_file(const std::string& name, std::chrono::milliseconds timeout) {
  const Address address = abstract_address(name);
  const File socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  FSDP2_CHECK(socket.is_open(), kIo, "[shm] asking for shared memory: ", std::strerror(errno), "; see ulimit -n");
  FSDP2_CHECK(uninterrupted([&] { return ::connect(socket.fd(), as_sockaddr(address), address.bytes); }) == 0, kIo,
              "[shm] cannot reach the rank that made the shared memory: ", std::strerror(errno),
              "; all ranks must run in one network namespace: use backend \"cpu:gloo\" where they do not");
  FSDP2_CHECK(is_same_user(socket.fd()), kIo, "[shm] the rank that made the shared memory runs as another user; all ",
              "ranks must run as one user");
  FSDP2_CHECK(becomes_readable(socket.fd(), timeout), kTimeout,
              "[shm] no answer from the rank that made the shared memory within ", timeout.count(), " ms");
  FileMessage answer;
  const bool received = uninterrupted([&] { return ::recvmsg(socket.fd(), &answer.message, MSG_CMSG_CLOEXEC); }) == 1;
  const cmsghdr* const header = received ? CMSG_FIRSTHDR(&answer.message) : nullptr;
  FSDP2_CHECK(header != nullptr && header->cmsg_type == SCM_RIGHTS, kIo,
              "[shm] did not get the shared memory from the rank that made it; it has failed, or this process may "
              "open no more files: see ulimit -n");
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
  return File(fd);
}

}  // namespace fsdp2::detail::shm
