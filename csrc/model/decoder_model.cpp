#include "model/decoder_model.h"

#include <ATen/Parallel.h>

#include <cstring>

#include "common/check.h"
#include "ops/adamw.h"

namespace nemo_rl::model {
namespace {

at::Tensor zeros(const ParameterLayout& layout, at::ScalarType dtype) { return at::zeros({layout.total}, dtype); }

}  // namespace

DecoderModel::DecoderModel(ModelConfig config, at::ScalarType dtype, bool trainable)
    : layout_(config), trainable_(trainable), decoder_(config, DecoderParameters(config, layout_, zeros(layout_, dtype))) {
  NRL_CHECK_ARG(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kDouble, "a model computes in float32, bfloat16 or float64, not ",
                c10::toString(dtype));
  if (dtype != at::kBFloat16) {
    masters_ = decoder_.parameters().flat;
  } else if (trainable) {
    masters_ = zeros(layout_, at::kFloat);
  }
}

void DecoderModel::masters_changed() {
  if (has_separate_masters()) ops::round_weights(masters_, compute());
}

std::uint64_t DecoderModel::digest() const {
  constexpr std::int64_t kBlock = 1 << 20;
  constexpr std::uint64_t kOffset = 14695981039346656037ull, kPrime = 1099511628211ull;
  const auto* bytes = static_cast<const char*>(compute().const_data_ptr());
  const auto n = static_cast<std::int64_t>(compute().nbytes()), blocks = (n + kBlock - 1) / kBlock;
  std::vector<std::uint64_t> parts(static_cast<std::size_t>(blocks));
  at::parallel_for(0, blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      std::uint64_t lanes[4] = {kOffset, kOffset + 1, kOffset + 2, kOffset + 3};  // words, in four chains: as fast as memory
      const std::int64_t size = std::min(kBlock, n - b * kBlock);
      std::int64_t i = 0;
      for (; i + 32 <= size; i += 32)
        for (int k = 0; k < 4; ++k) {
          std::uint64_t word;
          std::memcpy(&word, bytes + b * kBlock + i + 8 * k, 8);
          lanes[k] = (lanes[k] ^ word) * kPrime;
          lanes[k] ^= lanes[k] >> 29;  // multiplication only carries upwards
        }
      for (; i < size; ++i) lanes[0] = (lanes[0] ^ static_cast<unsigned char>(bytes[b * kBlock + i])) * kPrime;
      std::uint64_t hash = kOffset;
      for (auto lane : lanes) hash = (hash ^ lane) * kPrime, hash ^= hash >> 29;
      parts[static_cast<std::size_t>(b)] = hash;
    }
  });
  std::uint64_t hash = kOffset;
  for (auto part : parts) hash = (hash ^ part) * kPrime, hash ^= hash >> 29;
  return hash;
}

}  // namespace nemo_rl::model
