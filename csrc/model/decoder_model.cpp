#include "model/decoder_model.h"

#include <algorithm>

#include "common/check.h"
#include "kernels/weight_digest.h"
#include "ops/adamw.h"
#include "ops/weight_digest.h"
#include "runtime/large_tensor.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {
namespace {

at::Tensor zeros(const ParameterLayout& layout, at::ScalarType dtype, at::Device device) {
  return runtime::zeros_large({layout.total}, at::TensorOptions().dtype(dtype).device(device));
}

DecoderParameters parameters(const ModelConfig& config, const ParameterLayout& layout, at::ScalarType dtype,
                             at::Device device) {
  DecoderParameters all(config, layout, zeros(layout, dtype, device));
  all.add_blocks(config);
  return all;
}

/// The device with its index: "cuda" is the current one.
at::Device checked(at::Device device, at::ScalarType dtype) {
  NRL_CHECK_ARG(device.is_cpu() || device.is_cuda(), "a model lies on the CPU or on a CUDA device, not on ",
                device.str());
  NRL_CHECK_ARG(device.is_cpu() || dtype == at::kFloat || dtype == at::kBFloat16, "a model on ", device.str(),
                " computes in float32 or bfloat16, not ", c10::toString(dtype), "; set policy.precision");
  return at::empty({0}, at::TensorOptions().device(device)).device();
}

}  // namespace

DecoderModel::DecoderModel(ModelConfig config, at::ScalarType dtype, bool trainable, at::Device device,
                           std::shared_ptr<distributed::Communicator> peers)
    : DecoderModel(peers == nullptr ? config : config.sliced({peers->rank(), peers->size()}), dtype, trainable, device,
                   peers == nullptr ? nullptr : std::make_shared<distributed::Peers>(peers)) {}

DecoderModel::DecoderModel(ModelConfig config, at::ScalarType dtype, bool trainable, at::Device device,
                           std::shared_ptr<distributed::Peers> peers)
    : peers_(std::move(peers)),
      layout_(config),
      trainable_(trainable),
      decoder_(config, parameters(config, layout_, dtype, checked(device, dtype)), peers_.get()),
      workspace_(decoder_.device()),
      kept_(kept_activations_of(decoder_)) {
  NRL_CHECK_ARG(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kDouble,
                "a model computes in float32, bfloat16 or float64, not ", c10::toString(dtype));
  NRL_CHECK_ARG(peers_ == nullptr || decoder_.device().is_cpu(), "tensor parallelism works on the CPU only, not on ",
                decoder_.device().str());
  NRL_CHECK_ARG(!config.quantization || (!trainable && dtype != at::kDouble),
                "a quantised model is frozen, and in float32 or bfloat16; train adapters of it");
  if (dtype != at::kBFloat16) {
    masters_ = decoder_.parameters().flat;
  } else if (trainable) {
    masters_ = zeros(layout_, at::kFloat, decoder_.device());
  }
}

DecoderModel::DecoderModel(const DecoderModel& adapted, DecoderParameters base)
    : peers_(adapted.peers_),
      layout_(adapted.layout_),
      trainable_(false),
      decoder_(adapted.config(), std::move(base), peers_.get()),
      workspace_(decoder_.device()),
      kept_(kept_activations_of(decoder_)) {}

void DecoderModel::adapt(const LoraConfig& lora) {
  NRL_CHECK_ARG(!trainable_ && adapters_ == nullptr, "adapters are for a model that was built as a frozen one, once");
  NRL_CHECK_ARG(!lora.merge || !config().quantization, "adapters of a quantised model are not merged");
  adapters_ = std::make_unique<Adapters>(config(), lora, decoder_.parameters());
  decoder_.add_adapters(adapters_->added());
  trainable_ = true;
}

void DecoderModel::freeze_routers() {
  NRL_CHECK_ARG(trainable_ && adapters_ == nullptr, "routers are frozen in a model whose weights are trained");
  routers_are_frozen_ = true;
}

std::vector<std::pair<std::int64_t, std::int64_t>> DecoderModel::trained_parts(std::int64_t begin,
                                                                               std::int64_t end) const {
  std::vector<std::pair<std::int64_t, std::int64_t>> parts;
  for (const auto& layer : decoder_.parameters().layers) {
    for (const auto* frozen : {&layer.router_scale, &layer.router_weight, &layer.expert_scale}) {  // in memory's order
      if (!routers_are_frozen_ || !frozen->defined()) continue;
      const auto first = frozen->storage_offset() - compute().storage_offset();
      if (const auto until = std::min(first, end); begin < until) parts.emplace_back(begin, until);
      begin = std::max(begin, first + frozen->numel());
    }
  }
  if (begin < end) parts.emplace_back(begin, end);
  return parts;
}

std::shared_ptr<DecoderModel> DecoderModel::base() const {
  NRL_CHECK_ARG(!trainable_ || adapters_ != nullptr, "a model whose weights are trained has no base");
  return std::shared_ptr<DecoderModel>(new DecoderModel(*this, adapters_ ? adapters_->base() : decoder_.parameters()));
}

at::Tensor DecoderModel::merged() const {
  NRL_CHECK_ARG(!config().quantization, "a quantised model has no room for merged weights");
  if (adds_adapters() == nullptr) return compute();
  const auto flat = runtime::empty_large({layout_.total}, compute().options());
  flat.copy_(compute());
  adapters_->merge_into(DecoderParameters(config(), layout_, flat));
  return flat;
}

const ops::PackedWeights* DecoderModel::packed_for(std::int64_t rows, std::int64_t after) {
  if (config().has_experts())
    rows = (rows * config().experts.chosen + config().experts.count - 1) / config().experts.count;
  if (rows > ops::PackedWeights::most_rows() || compute().scalar_type() != at::kBFloat16 || !device().is_cpu())
    return nullptr;
  if (!is_packed_) {
    if (steps_of_few_rows_ < after) {
      ++steps_of_few_rows_;
      return nullptr;
    }
    for (std::int64_t l = 0; l < config().num_layers(); ++l) {
      const auto layer = decoder_.weights(l, {workspace_});
      const auto& kind = config().layers[static_cast<std::size_t>(l)];
      if (kind.has_mixer)
        for (const auto& tensor : decoder_.mixer(l).tensors())
          if (tensor.columns > 0 && !tensor.is_depthwise) layer.pack(tensor.field, packed_);
      if (kind.has_mlp) decoder_.mlp(l).pack(layer, packed_);
    }
    packed_.pack(decoder_.parameters().lm_head, /*gated=*/false);
    is_packed_ = true;
  }
  return &packed_;
}

at::Tensor DecoderModel::blocks(const BlockSpec& spec) const {
  if (spec.vocabulary != nullptr) return decoder_.parameters().*spec.vocabulary;
  return decoder_.parameters().layers[static_cast<std::size_t>(spec.layer)].*spec.matrix;
}

void DecoderModel::weights_changed() {
  kept_.clear();
  packed_.clear();
  is_packed_ = false;
  steps_of_few_rows_ = 0;
}

void DecoderModel::masters_changed() {
  if (adapters_) adapters_->masters_changed();
  if (adds_adapters() != nullptr) return kept_.clear();  // W, and its packed copy, are as they were
  if (has_separate_masters()) ops::round_weights(masters_, compute().narrow(0, masters_begin_, masters_.numel()));
  weights_changed();
}

void DecoderModel::keep_master_shard(std::int64_t begin, std::int64_t end) {
  if (!has_separate_masters() && !remainders_.defined()) return;
  auto& kept = remainders_.defined() ? remainders_ : masters_;
  NRL_CHECK(kept.numel() == layout_.total && 0 <= begin && begin <= end && end <= layout_.total, "a shard [", begin,
            ", ", end, ") of ", kept.numel(), " masters");
  kept = kept.narrow(0, begin, end - begin).clone();
  masters_begin_ = begin;
}

void DecoderModel::split_masters() {
  NRL_CHECK_ARG(has_separate_masters() && masters_.numel() == layout_.total,
                "remainders are stored for all master weights of a bfloat16 model");
  remainders_ = runtime::empty_large(masters_.sizes(), compute().options().dtype(at::kShort));
  ops::split_weights(masters_, compute(), remainders_);
  masters_ = at::Tensor();
  weights_changed();
}

std::uint64_t DecoderModel::digest() const {
  std::uint64_t own = ops::weight_digest(compute());
  if (decoder_.parameters().blocks.defined())
    own = kernels::digest_add(own, ops::weight_digest(decoder_.parameters().blocks));
  for (const auto& spec : layout_.blocks)
    if (spec.shape.size() == 1) own = kernels::digest_add(own, ops::weight_digest(blocks(spec)));
  if (adds_adapters() != nullptr) {
    const auto both = at::empty({2}, at::kLong);
    both.data_ptr<std::int64_t>()[0] = static_cast<std::int64_t>(own);
    both.data_ptr<std::int64_t>()[1] = static_cast<std::int64_t>(ops::weight_digest(masters()));
    own = ops::weight_digest(both);
  }
  if (peers_ == nullptr) return own;
  const auto mine = at::empty({1}, at::kLong);
  mine.data_ptr<std::int64_t>()[0] = static_cast<std::int64_t>(own);
  return ops::weight_digest(peers_->gather(mine, "the digest of all slices").clone());
}

}  // namespace nemo_rl::model
