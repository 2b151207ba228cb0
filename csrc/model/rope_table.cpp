#include "model/rope_table.h"

#include <algorithm>
#include <cmath>

#include "runtime/tensor.h"

namespace nemo_rl::model {

void RopeTable::reserve(std::int64_t positions) {
  const std::int64_t have = cos_.defined() ? cos_.size(0) : 0,
                     half = static_cast<std::int64_t>(config_.inv_freq.size());
  if (positions <= have) return;
  const std::int64_t size = std::max<std::int64_t>({positions, 2 * have, 256});
  auto cos = at::empty({size, half}, at::kFloat), sin = at::empty({size, half}, at::kFloat);
  for (std::int64_t p = 0; p < size; ++p)
    for (std::int64_t i = 0; i < half; ++i) {
      // the angle is rounded to float32 first, as transformers does
      const float angle = static_cast<float>(p) * static_cast<float>(config_.inv_freq[static_cast<std::size_t>(i)]);
      cos.data_ptr<float>()[p * half + i] =
          static_cast<float>(std::cos(static_cast<double>(angle)) * config_.attention_factor);
      sin.data_ptr<float>()[p * half + i] =
          static_cast<float>(std::sin(static_cast<double>(angle)) * config_.attention_factor);
    }
  cos_ = cos.to(device_);
  sin_ = sin.to(device_);
}

}  // namespace nemo_rl::model
