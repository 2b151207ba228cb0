#include "kernels/kl.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class T, KlEstimator type, bool weighted, bool gradient>
void run(const KlArgs<T>& a, std::int64_t begin, std::int64_t end) {
  const T in = static_cast<T>(a.input_clamp), out = static_cast<T>(a.output_clamp);
  const T* __restrict logprobs = a.logprobs;
  const T* __restrict reference = a.reference;
  const T* __restrict weights = a.weights;
  T* __restrict value = a.out;
  T* __restrict d_r = a.d_r;
  T* __restrict d_weight = a.d_weight;
  for (std::int64_t i = begin; i < end; ++i) {
    const KlTerm<T> k = kl_term(type, logprobs[i], reference[i], weighted ? weights[i] : T(1), in, out);
    value[i] = k.value;
    if (gradient) {
      d_r[i] = k.d_r;
      d_weight[i] = k.d_weight;
    }
  }
}

template <class T, KlEstimator type>
void choose(const KlArgs<T>& a, std::int64_t begin, std::int64_t end) {
  if (a.weights) return a.d_r ? run<T, type, true, true>(a, begin, end) : run<T, type, true, false>(a, begin, end);
  return a.d_r ? run<T, type, false, true>(a, begin, end) : run<T, type, false, false>(a, begin, end);
}

template <class T>
void dispatch(const KlArgs<T>& a, std::int64_t begin, std::int64_t end) {
  if (a.type == KlEstimator::k1) return choose<T, KlEstimator::k1>(a, begin, end);
  if (a.type == KlEstimator::k2) return choose<T, KlEstimator::k2>(a, begin, end);
  choose<T, KlEstimator::k3>(a, begin, end);
}

}  // namespace

void calculate_kl_f32(const KlArgs<float>& a, std::int64_t begin, std::int64_t end) { dispatch(a, begin, end); }
void calculate_kl_f64(const KlArgs<double>& a, std::int64_t begin, std::int64_t end) { dispatch(a, begin, end); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
