#include "kernels/group_baseline.h"

#include <cmath>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace nemo_rl::kernels {
namespace {

struct SampleStats {
  double baseline = 0, std = 0;
};

/// Statistics for `sample` from its group's members.
SampleStats sample_stats(const GroupBaselineArgs& a, const std::vector<std::int64_t>& members, std::int64_t sample,
                         double num_valid) {
  const double* q = a.std_rewards ? a.std_rewards : a.rewards;
  const double k = num_valid - (a.leave_one_out ? 1.0 : 0.0);
  double weight = 0, sum_r = 0, sum_q = 0, sum_q2 = 0, low = HUGE_VAL, high = -HUGE_VAL;
  for (const std::int64_t j : members) {
    const double v = a.valid[j];
    if ((a.leave_one_out && j == sample) || v == 0) continue;
    weight += v;
    sum_r += a.rewards[j] * v;
    sum_q += q[j] * v;
    sum_q2 += q[j] * q[j] * v;
    low = q[j] < low ? q[j] : low;
    high = q[j] > high ? q[j] : high;
  }
  SampleStats out;
  out.baseline = sum_r / k;
  double variance = 0;
  if (weight != k) {  // an invalid sample left out of its own group: the sums are not means, the formula is literal
    variance = (sum_q2 / k - (sum_q / k) * (sum_q / k)) * (k / (k - 1.0));
  } else if (low < high) {
    const double mean = sum_q / k;
    for (const std::int64_t j : members)
      if (!(a.leave_one_out && j == sample) && a.valid[j] != 0) variance += a.valid[j] * (q[j] - mean) * (q[j] - mean);
    variance /= k - 1.0;
  } else if (q == a.rewards && low == high) {
    out.baseline = low;  // equal values: their mean without rounding
  }
  out.std = variance > 0 && std::isfinite(variance) ? std::sqrt(variance) : 0.0;
  return out;
}

}  // namespace

void group_baseline(const GroupBaselineArgs& a) {
  std::unordered_map<std::int64_t, std::vector<std::int64_t>> groups;
  for (std::int64_t i = 0; i < a.num_samples; ++i) groups[a.group[i]].push_back(i);
  for (const auto& [id, members] : groups) {
    double num_valid = 0;
    for (const std::int64_t j : members) num_valid += a.valid[j];
    for (const std::int64_t i : members) {
      const SampleStats s = num_valid <= 1 ? SampleStats{a.rewards[i], 0.0} : sample_stats(a, members, i, num_valid);
      a.baseline[i] = s.baseline;
      a.std[i] = s.std;
    }
  }
}

void first_equal_row(const unsigned char* rows, std::int64_t num_rows, std::int64_t row_bytes, std::int64_t* out) {
  std::unordered_map<std::string_view, std::int64_t> seen;
  for (std::int64_t i = 0; i < num_rows; ++i) {
    const std::string_view key(reinterpret_cast<const char*>(rows + i * row_bytes),
                               static_cast<std::size_t>(row_bytes));
    out[i] = seen.try_emplace(key, i).first->second;
  }
}

}  // namespace nemo_rl::kernels
