// Baseline and spread of a sample's group. With v the valid samples of the group (the sample itself left out if
// leave_one_out), k = valid samples of the group - (1 if leave_one_out):
//   baseline = sum_v r / k,     std = sqrt((sum_v q^2 / k - (sum_v q / k)^2) k / (k - 1)),  q = std_rewards or r
// A group with at most one valid sample: baseline = the sample's own reward, std 0. A std that is no finite number is
// 0.
#pragma once
#include <cstdint>

namespace nemo_rl::kernels {

struct GroupBaselineArgs {
  std::int64_t num_samples = 0;
  const double* rewards = nullptr;
  const double* std_rewards = nullptr;  ///< null: rewards
  const double* valid = nullptr;
  const std::int64_t* group = nullptr;  ///< any integers; equal ones form a group, need not be adjacent
  bool leave_one_out = true;
  double* baseline = nullptr;
  double* std = nullptr;
};

/// In double and in two passes: equal rewards give exactly 0, whatever their value.
void group_baseline(const GroupBaselineArgs& args);

/// out[i] = index of the first row equal to row i, byte by byte.
void first_equal_row(const unsigned char* rows, std::int64_t num_rows, std::int64_t row_bytes, std::int64_t* out);

}  // namespace nemo_rl::kernels
