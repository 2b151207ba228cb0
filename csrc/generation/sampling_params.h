// The sampling settings and the stop conditions of one request.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "generation/stop_strings.h"
#include "kernels/sampling.h"

namespace nemo_rl::generation {

struct SamplingParams {
  kernels::SamplingRule rule;
  std::int64_t max_new_tokens = 16;
  std::vector<std::int64_t> stop_token_ids;
  std::shared_ptr<const StopStrings> stop_strings;  ///< none if null
  std::int64_t num_likeliest = 0;                   ///< most likely tokens to report per token, see ops/likeliest.h
};

}  // namespace nemo_rl::generation
