#include "kernels/kl.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class T, KlEstimator type>
void run(const KlArgs<T>& a, std::int64_t begin, std::int64_t end) {
  const T in = static_cast<T>(a.input_clamp), out = static_cast<T>(a.output_clamp);
  for (std::int64_t i = begin; i < end; ++i) {
    const KlTerm<T> k = kl_term(type, a.logprobs[i], a.reference[i], a.weights ? a.weights[i] : T(1), in, out);
    a.out[i] = k.value;
    if (a.d_r) a.d_r[i] = k.d_r;
    if (a.d_weight) a.d_weight[i] = k.d_weight;
  }
}

template <class T>
void dispatch(const KlArgs<T>& a, std::int64_t begin, std::int64_t end) {
  if (a.type == KlEstimator::k1) return run<T, KlEstimator::k1>(a, begin, end);
  if (a.type == KlEstimator::k2) return run<T, KlEstimator::k2>(a, begin, end);
  run<T, KlEstimator::k3>(a, begin, end);
}

}  // namespace

void calculate_kl_f32(const KlArgs<float>& a, std::int64_t begin, std::int64_t end) { dispatch(a, begin, end); }
void calculate_kl_f64(const KlArgs<double>& a, std::int64_t begin, std::int64_t end) { dispatch(a, begin, end); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
