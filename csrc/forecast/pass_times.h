// How long the passes of a run take on this machine, measured in about a second. The passes run on a miniature of the
// model with random weights: some layers of each kind, and as large a part of the vocabulary. The times of the whole
// model follow in proportion.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "model/config.h"
#include "model/filtered_row.h"
#include "trainer/trainer.h"

namespace nemo_rl::forecast {

struct Miniature {
  model::ModelConfig config;
  double scale = 1;  ///< layers of the model per layer of the miniature
};

/// Returns the smallest miniature with at least `least` weights, or else the whole model. Its kinds of layers are as
/// frequent as in the model; kinds that are fewer than a tenth of all layers may be missing.
Miniature miniature(const model::ModelConfig& whole, double least);

/// A decode step of `rows` sequences that have a prompt of `prompt` tokens and `own` more tokens. `group` of them share
/// a prompt.
struct DecodeStep {
  std::int64_t rows = 1, prompt = 0, own = 0, group = 1;
};

struct Passes {
  at::ScalarType dtype = at::kFloat;
  std::optional<model::LoraConfig> lora;  ///< of adapters; `targets` are names of matrices, such as q_proj
  bool trains = true, scores = false;     ///< whether there are passes with and without gradients
  bool checkpoint = false;                ///< activation checkpointing
  bool packs = true;                      ///< decode steps of few sequences read packed weights
  std::int64_t length = 0;                ///< tokens of a sequence, at least 2
  std::int64_t micro_batch = 0;           ///< tokens of a micro-batch
  double trained = 1;                     ///< share of its tokens that are trained or scored
  model::TokenScoring sampling;
  std::vector<DecodeStep> decode;
};

/// Seconds.
struct PassTimes {
  double prefill = 0;          ///< per token of a prompt: the layers without the LM head
  double score = 0;            ///< per token of a micro-batch, without gradients
  double forward = 0;          ///< per token of a trained micro-batch, with the LM head's part of the backward pass
  double backward = 0;         ///< per token of a trained micro-batch
  double update = 0;           ///< per optimizer step
  double packing = 0;          ///< packing the weights after an update
  std::vector<double> decode;  ///< per step, with sampling
};

/// Throws ArgumentError if the miniature would take gigabytes, because the layers are large.
PassTimes pass_times(const model::ModelConfig& config, const Passes& passes);

}  // namespace nemo_rl::forecast
