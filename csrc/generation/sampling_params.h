// How one request is sampled and where it stops.
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
  std::int64_t num_likeliest = 0;                   ///< tokens that are told beside each drawn one, see ops/likeliest.h
};

}  // namespace nemo_rl::generation
