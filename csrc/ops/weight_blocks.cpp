#include "ops/weight_blocks.h"

#include <algorithm>
#include <string_view>

#include "ops/kernel_types.h"
#include "runtime/parallel_items.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {

runtime::CudaSlot<void(const BlockMatrix&, const at::Tensor&, std::int64_t)> unpack_blocks_cuda("unpack_blocks");

namespace {

struct NamedFormat {
  std::string_view name;
  BlockFormat format;
};
constexpr NamedFormat kFormats[] = {
    {"q8_0", BlockFormat::q8_0}, {"q4_0", BlockFormat::q4_0}, {"nf4", BlockFormat::nf4}};

constexpr std::int64_t kWeightsAtOnce = std::int64_t{1} << 16;  ///< that one thread takes

BlockMatrix checked(const at::Tensor& blocks, const at::Tensor& w, std::int64_t first, const char* op) {
  NRL_CHECK_ARG((w.is_cpu() || w.device() == blocks.device()) && w.dim() == 2 && w.stride(1) == 1 &&
                    blocks.dim() == 2 && first >= 0 && first + w.size(0) <= blocks.size(0) &&
                    (w.scalar_type() == at::kFloat || w.scalar_type() == at::kBFloat16),
                op, ": weights ", w.sizes(), " of type ", c10::toString(w.scalar_type()), " for rows from ", first,
                " on of blocks ", blocks.sizes(), "; they are float32 or bfloat16 on the CPU or the blocks' device");
  return {blocks, w.size(1)};
}

/// Calls f(matrix on the CPU, its row that is `first`) for the whole tiles that hold rows [first, first + count) of
/// blocks on a device; copies them back if `changes`.
template <class F>
void with_tiles_on_cpu(const at::Tensor& blocks, std::int64_t first, std::int64_t count, bool changes, const F& f) {
  constexpr std::int64_t kTile = kernels::kBlockTileRows;
  const std::int64_t begin = first / kTile * kTile, end = (first + count + kTile - 1) / kTile * kTile,
                     bytes = blocks.size(1);
  const auto there = blocks.as_strided({end - begin, bytes}, {bytes, 1}, blocks.storage_offset() + begin * bytes);
  const auto here = there.cpu();
  f(here, first - begin);
  if (changes) there.copy_(here);
}

/// Calls f(first row, number of rows) for parts of `rows` rows: whole tiles where they begin with one.
template <class F>
void for_parts(std::int64_t rows, std::int64_t columns, const F& f) {
  constexpr std::int64_t kTile = kernels::kBlockTileRows;
  const std::int64_t grain = std::max<std::int64_t>(1, kWeightsAtOnce / kTile / std::max<std::int64_t>(1, columns));
  runtime::parallel_rows((rows + kTile - 1) / kTile, grain, [&](std::int64_t begin, std::int64_t end) {
    f(begin * kTile, std::min(end * kTile, rows) - begin * kTile);
  });
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
  NRL_CHECK_ARG((blocks.is_cpu() || blocks.is_cuda()) && blocks.dim() == 2 && blocks.is_contiguous() &&
                    in_blocks(blocks) && columns % kernels::kBlockTerms == 0 &&
                    bytes == kernels::block_row_bytes(format_, columns),
                "a matrix of ", columns,
                " columns in blocks is uint8 with rows of 34 (q8_0), 18 (q4_0) or 20 bytes (nf4) "
                "for each 32 columns, got ",
                blocks.sizes());
  const auto has = static_cast<std::int64_t>(blocks.storage().nbytes()) - blocks.storage_offset(),
             needs = kernels::block_matrix_bytes(format_, rows_, columns);
  NRL_CHECK_ARG(has >= needs, "a matrix of blocks ", blocks.sizes(), " lies in whole tiles of ",
                kernels::kBlockTileRows, " rows, which take ", needs, " bytes, not ", has, ": make it by zero_blocks");
  at_ = static_cast<std::byte*>(const_cast<void*>(blocks.const_data_ptr()));
}

at::Tensor zero_blocks(std::int64_t rows, std::int64_t columns, BlockFormat format) {
  const std::int64_t bytes = kernels::block_row_bytes(format, columns);
  return at::zeros({kernels::block_matrix_bytes(format, rows, columns)}, at::kByte)
      .narrow(0, 0, rows * bytes)
      .view({rows, bytes});
}

void pack_blocks(const at::Tensor& w, const at::Tensor& blocks, std::int64_t first) {
  const BlockMatrix to = checked(blocks, w, first, "pack_blocks");
  if (blocks.is_cuda())
    return with_tiles_on_cpu(blocks, first, w.size(0), /*changes=*/true,
                             [&](const at::Tensor& tiles, std::int64_t at) { pack_blocks(w.cpu(), tiles, at); });
  const auto pack = [&](auto* kernel, const auto* from) {
    for_parts(w.size(0), w.size(1), [&](std::int64_t begin, std::int64_t rows) {
      kernel(to.format(), from + begin * w.stride(0), w.stride(0), first + begin, rows, w.size(1), to.tiles());
    });
  };
  if (w.scalar_type() == at::kFloat) return pack(kernels::pack_blocks_f32, ptr<float>(w));
  pack(kernels::pack_blocks_bf16, ptr<bfloat16>(w));
}

void write_block_rows(const at::Tensor& rows, const at::Tensor& blocks, std::int64_t columns, std::int64_t first) {
  const BlockMatrix to(blocks, columns);
  NRL_CHECK_ARG(rows.is_cpu() && in_blocks(rows) && rows.dim() == 2 && rows.is_contiguous() &&
                    rows.size(1) == blocks.size(1) && first >= 0 && first + rows.size(0) <= to.rows(),
                "write_block_rows: rows ", rows.sizes(), " for rows from ", first, " on of blocks ", blocks.sizes());
  if (blocks.is_cuda())
    return with_tiles_on_cpu(
        blocks, first, rows.size(0), /*changes=*/true,
        [&](const at::Tensor& tiles, std::int64_t at) { write_block_rows(rows, tiles, columns, at); });
  const auto* const from = static_cast<const std::byte*>(rows.const_data_ptr());
  for_parts(rows.size(0), columns, [&](std::int64_t begin, std::int64_t count) {
    kernels::write_block_rows(to.format(), from + begin * rows.size(1), first + begin, count, columns, to.tiles());
  });
}

at::Tensor read_block_rows(const at::Tensor& blocks, std::int64_t columns, std::int64_t first, std::int64_t count) {
  const BlockMatrix from(blocks, columns);
  NRL_CHECK_ARG(first >= 0 && count >= 0 && first + count <= from.rows(), "read_block_rows: rows [", first, ", ",
                first + count, ") of blocks ", blocks.sizes());
  if (blocks.is_cuda()) {
    at::Tensor read;
    with_tiles_on_cpu(blocks, first, count, /*changes=*/false, [&](const at::Tensor& tiles, std::int64_t at) {
      read = read_block_rows(tiles, columns, at, count);
    });
    return read;
  }
  const auto rows = at::empty({count, blocks.size(1)}, at::kByte);
  auto* const to = static_cast<std::byte*>(rows.data_ptr());
  for_parts(count, columns, [&](std::int64_t begin, std::int64_t n) {
    kernels::read_block_rows(from.format(), from.tiles(), first + begin, n, columns, to + begin * rows.size(1));
  });
  return rows;
}

void unpack_blocks(const at::Tensor& blocks, const at::Tensor& w, std::int64_t first) {
  const BlockMatrix from = checked(blocks, w, first, "unpack_blocks");
  if (w.is_cuda()) return unpack_blocks_cuda.get(w)(from, w, first);
  if (blocks.is_cuda())
    return with_tiles_on_cpu(blocks, first, w.size(0), /*changes=*/false,
                             [&](const at::Tensor& tiles, std::int64_t at) { unpack_blocks(tiles, w, at); });
  const auto unpack = [&](auto* kernel, auto* to) {
    for_parts(w.size(0), w.size(1), [&](std::int64_t begin, std::int64_t rows) {
      kernel(from.format(), from.tiles(), first + begin, rows, w.size(1), to + begin * w.stride(0), w.stride(0));
    });
  };
  if (w.scalar_type() == at::kFloat) return unpack(kernels::unpack_blocks_f32, mutable_ptr<float>(w));
  unpack(kernels::unpack_blocks_bf16, mutable_ptr<bfloat16>(w));
}

}  // namespace nemo_rl::ops
