// labels: ranks
// `.checksums` with blocks of other sizes than this release writes, as written by hand from its layout: they load, and
// a changed byte is found. Sizes that cannot be are errors.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "dcp/same.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;

template <class T>
void append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}
/// CRC-32 bit by bit, as zlib's.
uint32_t sum_of(const char* data, size_t size) {
  uint32_t sum = ~0u;
  for (size_t i = 0; i < size; ++i) {
    sum ^= static_cast<unsigned char>(data[i]);
    for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ (sum & 1 ? 0xEDB88320u : 0);
  }
  return ~sum;
}

class Cursor {
 public:
  explicit Cursor(std::string bytes) : bytes_(std::move(bytes)) {}
  std::string take(size_t size) {
    const std::string result = bytes_.substr(at_, size);
    at_ += size;
    return result;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }

 private:
  std::string bytes_;
  size_t at_ = 0;
};

/// The same items as in `sidecar`, summed in blocks of `block`. Note [Layout of .checksums] says what is where.
std::string in_blocks_of(uint32_t block, const std::string& sidecar, const fs::path& checkpoint) {
  Cursor in(sidecar);
  std::string out = in.take(std::strlen("fsdp2 checksums 1\n"));
  const auto old_block = in.number<uint32_t>(), files = in.number<uint32_t>();
  append(out, block);
  append(out, files);
  for (uint32_t file = 0; file < files; ++file) {
    const std::string name = in.take(in.number<uint32_t>());
    const std::string content = read_file(checkpoint / name);
    const auto items = in.number<uint64_t>();
    append(out, static_cast<uint32_t>(name.size()));
    out += name;
    append(out, items);
    for (uint64_t item = 0; item < items; ++item) {
      const auto offset = in.number<uint64_t>(), length = in.number<uint64_t>();
      append(out, offset);
      append(out, length);
      in.take((length + old_block - 1) / old_block * sizeof(uint32_t));
      for (uint64_t at = 0; at < length && block > 0; at += block)
        append(out, sum_of(content.data() + offset + at, std::min<uint64_t>(block, length - at)));
    }
  }
  append(out, sum_of(out.data(), out.size()));
  return out;
}

void write(const fs::path& file, const std::string& content) {
  std::ofstream(file, std::ios::binary | std::ios::trunc) << content;
}

TEST(ChecksumBlocks, OfAnySensibleSizeAreCompared) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  const dcp::StateDict state{{"w", torch::arange(200000, torch::kFloat)}, {"step", 5}};
  dcp::save(state, path);
  const std::string data = read_file(path / "__0_0.distcp"), sidecar = read_file(path / ".checksums");
  ASSERT_GT(data.size(), 800000u);
  for (const uint32_t block : {1u << 10, 5000u, 64u << 10, 256u << 10, 64u << 20}) {
    write(path / ".checksums", in_blocks_of(block, sidecar, path));
    dcp::StateDict target{{"w", torch::zeros({200000})}, {"step", 0}};
    dcp::load(target, path);
    EXPECT_TRUE(same(target, state)) << block;
    EXPECT_TRUE(dcp::verify(path).ok()) << block;
    for (const size_t at : {size_t{100000}, data.size() / 2, data.size() - 100000}) {
      std::string changed = data;
      changed[at] = static_cast<char>(changed[at] ^ 1);
      write(path / "__0_0.distcp", changed);
      EXPECT_FSDP2_ERROR(dcp::load(target, path), kCorruption, "have the checksum");
      EXPECT_FALSE(dcp::verify(path).ok()) << block << " " << at;
    }
    write(path / "__0_0.distcp", data);
  }
}

TEST(ChecksumBlocks, OfNoOrHugeSizeAreErrors) {
  const TempDir folder;
  const fs::path path = fs::path(folder.path()) / "ckpt";
  dcp::StateDict state{{"w", torch::arange(1000, torch::kFloat)}};
  dcp::save(state, path);
  const std::string sidecar = read_file(path / ".checksums");
  for (const uint32_t block : {0u, 1u, 128u << 20, UINT32_MAX}) {
    write(path / ".checksums", in_blocks_of(block, sidecar, path));
    EXPECT_FSDP2_ERROR(dcp::load(state, path), kCorruption, "impossible size");
    dcp::load(state, path, {.verify_checksums = false});
  }
}

}  // namespace
}  // namespace fsdp2::testing
