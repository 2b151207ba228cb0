#include "model/decoder_model.h"

#include "common/check.h"
#include "ops/adamw.h"
#include "ops/weight_digest.h"

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

std::uint64_t DecoderModel::digest() const { return ops::weight_digest(compute()); }

}  // namespace nemo_rl::model
