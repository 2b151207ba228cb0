#include "ops/weight_blocks.h"

#include <algorithm>
#include <string_view>

#include "ops/kernel_types.h"
#include "runtime/parallel_items.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {
namespace {

struct NamedFormat {
  std::string_view name;
  BlockFormat format;
};
constexpr NamedFormat kFormats[] = {
    {"q8_0", BlockFormat::q8_0}, {"q4_0", BlockFormat::q4_0}, {"nf4", BlockFormat::nf4}};

constexpr std::int64_t kWeightsAtOnce = std::int64_t{1} << 16;  ///< that one thread takes

BlockMatrix checked(const at::Tensor& blocks, const at::Tensor& w, const char* op) {
  NRL_CHECK_ARG(w.is_cpu() && w.dim() == 2 && w.stride(1) == 1 && blocks.dim() == 2 && w.size(0) == blocks.size(0) &&
                    (w.scalar_type() == at::kFloat || w.scalar_type() == at::kBFloat16),
                op, ": weights ", w.sizes(), " of type ", c10::toString(w.scalar_type()), " for blocks ",
                blocks.sizes(), "; they are float32 or bfloat16 on the CPU");
  return {blocks, w.size(1)};
}

/// Calls f(first row, number of rows) for parts of a matrix.
template <class F>
void for_parts(const BlockMatrix& blocks, const F& f) {
  const std::int64_t grain = std::max<std::int64_t>(1, kWeightsAtOnce / std::max<std::int64_t>(1, blocks.columns()));
  runtime::parallel_rows(blocks.rows(), grain, [&](std::int64_t begin, std::int64_t end) { f(begin, end - begin); });
}

}  // namespace

BlockFormat block_format(const std::string& name) {
  const auto* const found = std::ranges::find(kFormats, name, &NamedFormat::name);
  NRL_CHECK_ARG(found != std::end(kFormats), "weights lie in blocks of the format q8_0, q4_0 or nf4, not ", name);
  return found->format;
}

BlockMatrix::BlockMatrix(const at::Tensor& blocks, std::int64_t columns)
    : format_(BlockFormat::q8_0), rows_(blocks.dim() == 2 ? blocks.size(0) : 0), columns_(columns) {
  const std::int64_t bytes = blocks.dim() == 2 ? blocks.size(1) : 0;
  for (const auto& [name, format] : kFormats)
    if (bytes == kernels::block_row_bytes(format, columns)) format_ = format;
  NRL_CHECK_ARG(blocks.is_cpu() && blocks.dim() == 2 && blocks.is_contiguous() && in_blocks(blocks) &&
                    columns % kernels::kBlockTerms == 0 && bytes == kernels::block_row_bytes(format_, columns),
                "a matrix of ", columns,
                " columns in blocks is uint8 on the CPU with rows of 34 (q8_0), 18 (q4_0) or 20 bytes (nf4) "
                "for each 32 columns, got ",
                blocks.sizes());
  at_ = static_cast<std::byte*>(const_cast<void*>(blocks.const_data_ptr()));
}

void pack_blocks(const at::Tensor& w, const at::Tensor& blocks) {
  const BlockMatrix to = checked(blocks, w, "pack_blocks");
  const auto pack = [&](auto* kernel, const auto* from) {
    for_parts(to, [&](std::int64_t begin, std::int64_t rows) {
      kernel(to.format(), from + begin * w.stride(0), w.stride(0), rows, w.size(1), to.row(begin));
    });
  };
  if (w.scalar_type() == at::kFloat) return pack(kernels::pack_blocks_f32, ptr<float>(w));
  pack(kernels::pack_blocks_bf16, ptr<bfloat16>(w));
}

void unpack_blocks(const at::Tensor& blocks, const at::Tensor& w) {
  const BlockMatrix from = checked(blocks, w, "unpack_blocks");
  const auto unpack = [&](auto* kernel, auto* to) {
    for_parts(from, [&](std::int64_t begin, std::int64_t rows) {
      kernel(from.format(), from.row(begin), rows, w.size(1), to + begin * w.stride(0), w.stride(0));
    });
  };
  if (w.scalar_type() == at::kFloat) return unpack(kernels::unpack_blocks_f32, mutable_ptr<float>(w));
  unpack(kernels::unpack_blocks_bf16, mutable_ptr<bfloat16>(w));
}

}  // namespace nemo_rl::ops
