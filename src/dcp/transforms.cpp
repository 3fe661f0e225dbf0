#include "dcp/transforms.h"

#include <fsdp2/error.h>
#include <zstd.h>

#include <algorithm>
#include <optional>

#include "dcp/crc32.h"

namespace fsdp2::dcp::detail {
namespace {

constexpr uint64_t kMaxRatio = 32768;  // a block of 4 bytes stands for 128 KiB at most
constexpr uint64_t kValueBytes = uint64_t{256} << 20, kValueRatio = 1000;
constexpr size_t kBlockBytes = size_t{256} << 10;

uint64_t saturating(uint64_t value, uint64_t factor, uint64_t more) {
  uint64_t result = 0;
  if (__builtin_mul_overflow(value, factor, &result) || __builtin_add_overflow(result, more, &result))
    return UINT64_MAX;
  return result;
}

void check_known(const std::string& transform, const std::string& what) {
  const size_t slash = transform.find('/');
  const std::string name = transform.substr(0, slash),
                    version = slash == std::string::npos ? "" : transform.substr(slash + 1);
  FSDP2_CHECK(name == "stream.zstd" && version.substr(0, version.find('.')) == "1", kUnsupported, "[dcp] ", what,
              ": was saved through the transform '", transform.substr(0, 100), "'; the only one that is known is ",
              kZstdTransform);
}

struct FreeDecompressor {
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

std::string decompress(const ByteRange& stored, uint64_t most) {
  const std::unique_ptr<ZSTD_DCtx, FreeDecompressor> context(ZSTD_createDCtx());
  FSDP2_CHECK(context != nullptr, kIo, "[dcp] ", stored.what(), ": there is no memory for decompression");
  std::string result;
  std::string block(static_cast<size_t>(std::min<uint64_t>(kBlockBytes, stored.size())), '\0');
  size_t filled = 0, more = 1;  // `more`: 0 at the end of a frame
  for (uint64_t done = 0; done < stored.size();) {
    const auto part = static_cast<size_t>(std::min<uint64_t>(block.size(), stored.size() - done));
    stored.read(done, block.data(), part);
    ZSTD_inBuffer in{block.data(), part, 0};
    bool is_full = true;  // output may wait inside although all input was taken
    while (in.pos < in.size || (is_full && more != 0)) {
      if (filled == result.size()) {
        // One byte more than allowed shows that there would be more.
        const uint64_t wanted =
            std::min(std::min(most, UINT64_MAX - 1) + 1, std::max<uint64_t>(2 * result.size(), kBlockBytes));
        FSDP2_CHECK(filled <= most, kCorruption, "[dcp] ", stored.what(), ": its ", stored.size(),
                    " bytes become more than the ", most, " that it may have decompressed");
        result.resize(static_cast<size_t>(wanted));
      }
      ZSTD_outBuffer out{result.data(), result.size(), filled};
      more = ZSTD_decompressStream(context.get(), &out, &in);
      FSDP2_CHECK(!ZSTD_isError(more), kCorruption, "[dcp] ", stored.what(), ": its zstd data are damaged near offset ",
                  done + in.pos, " of the item: ", ZSTD_getErrorName(more));
      filled = out.pos;
      is_full = out.pos == out.size;
    }
    done += part;
  }
  FSDP2_CHECK(filled <= most, kCorruption, "[dcp] ", stored.what(), ": its ", stored.size(),
              " bytes become more than the ", most, " that it may have decompressed");
  FSDP2_CHECK(more == 0, kCorruption, "[dcp] ", stored.what(), ": its ", stored.size(),
              " bytes of zstd data end in the middle of a frame; the file was cut or the metadata lie");
  result.resize(filled);
  return result;
}

}  // namespace

uint64_t most_undone_bytes(uint64_t length, const std::vector<std::string>& transforms) {
  for (size_t i = 0; i < transforms.size(); ++i) length = saturating(length, kMaxRatio, 0);
  return length;
}
uint64_t most_value_bytes(uint64_t length, const std::vector<std::string>& transforms) {
  return std::min(most_undone_bytes(length, transforms), saturating(length, kValueRatio, kValueBytes));
}

ByteRange undo_transforms(const ByteRange& stored, const std::vector<std::string>& transforms, uint64_t most) {
  FSDP2_CHECK(!transforms.empty(), kInvalidArgument, "[dcp] ", stored.what(), " went through no transform");
  for (const std::string& transform : transforms) check_known(transform, stored.what());
  std::optional<ByteRange> between;
  for (size_t left = transforms.size(); left-- > 0;) {
    // What is still compressed may be a little longer than what it stands for.
    const uint64_t bound = left == 0 ? most : saturating(most, 1, most / 128 + kBlockBytes);
    std::string content = decompress(between ? *between : stored, bound);
    between.emplace(std::move(content), stored.what());
  }
  return std::move(*between);
}

struct ZstdSink::Context {
  Context() : stream(ZSTD_createCCtx()), buffer(ZSTD_CStreamOutSize(), '\0') {}
  ~Context() { ZSTD_freeCCtx(stream); }
  Context(const Context&) = delete;

  ZSTD_CCtx* stream;
  std::string buffer;
};

ZstdSink::ZstdSink(ByteSink& out) : context_(std::make_unique<Context>()), out_(out) {
  FSDP2_CHECK(context_->stream != nullptr, kIo, "[dcp] there is no memory for compression");
  ZSTD_CCtx_setParameter(context_->stream, ZSTD_c_checksumFlag, 1);
}
ZstdSink::~ZstdSink() = default;

void ZstdSink::compress(const void* data, size_t size, bool last) {
  ZSTD_inBuffer in{data, size, 0};
  size_t left = 0;
  do {
    ZSTD_outBuffer out{context_->buffer.data(), context_->buffer.size(), 0};
    left = ZSTD_compressStream2(context_->stream, &out, &in, last ? ZSTD_e_end : ZSTD_e_continue);
    FSDP2_CHECK(!ZSTD_isError(left), kIo, "[dcp] compressing with zstd failed: ", ZSTD_getErrorName(left));
    if (out.pos > 0) out_.write(context_->buffer.data(), out.pos);
  } while (last ? left > 0 : in.pos < in.size);
}

uint32_t ZstdSink::write(const void* data, size_t size) {
  compress(data, size, false);
  position_ += size;
  return crc32(0, data, size);
}

void ZstdSink::finish() { compress(nullptr, 0, true); }

}  // namespace fsdp2::dcp::detail
