// The trainer of one model, or the scorer of a frozen one: a packed forward pass to one number per token, a backward
// pass from the gradient of these numbers, clipping and AdamW. The number is the token's log-probability, or with a
// value head the value of the state before the token. The loss is outside the trainer: it receives these numbers and
// returns their gradient.
#pragma once
#include <memory>
#include <optional>
#include <utility>

#include "model/decoder_model.h"
#include "ops/adamw.h"
#include "ops/experts.h"
#include "trainer/gradients.h"
#include "trainer/kept_moves.h"
#include "trainer/packed_batch.h"
#include "trainer/token_loss.h"

namespace nemo_rl::trainer {

struct OptimizerStep {
  double grad_norm = 0;  ///< before clipping
  bool finite = true;    ///< false: nothing was changed
};

struct ForwardOptions {
  bool share_prefix = false;
  bool keep = false;        ///< a backward pass follows
  bool checkpoint = false;  ///< keep only layer inputs, and recompute the rest
};

/// The outputs of a forward pass for the tokens to score, or their gradients: CPU tensors in the accumulation dtype.
/// Entries of other tokens are untouched. All tensors but the first are optional.
struct TokenOutputs {
  at::Tensor out;         ///< log-probability (-inf if top-k or top-p removes the token); with a value head the value.
                          ///< [T, K] if the batch has targets, otherwise shaped like its token_ids
  at::Tensor unfiltered;  ///< the same without top-k and top-p
  at::Tensor entropy;     ///< shaped like token_ids: in nats, of the token's distribution without top-k and top-p
};

/// What the optimizer's state is stored in. The dtypes of AdamW's moments: none (that of the master weights), bfloat16,
/// or both uint8, rounded as in kernels/adamw.h.
struct StateTypes {
  std::optional<at::ScalarType> exp_avg, exp_avg_sq;
  bool store_param_remainders = false;  ///< see DecoderModel::split_masters
};

class Trainer {
 public:
  /// `together`: the processes that train one model, each on a part of the samples; by default only this process. Each
  /// holds all weights (or the same tensor-parallel slice, see DecoderModel's `peers`), and the master weights and
  /// optimizer state of its shard. With several processes the model must be on the CPU. `state`: what the
  /// optimizer's state is stored in.
  explicit Trainer(std::shared_ptr<model::DecoderModel> model, TrainedTogether together = {}, StateTypes state = {});

  model::DecoderModel& model() { return *model_; }

  /// Fills `outputs`. With a value head, `scoring` must be the default, and only `out` may be defined.
  void forward(const RowBatch& batch, const std::vector<std::int64_t>& samples, const model::TokenScoring& scoring,
               const ForwardOptions& options, const TokenOutputs& outputs);

  /// Finds the most likely tokens at each token to score: ids int64 [T, k] and logprobs [T, k] in the accumulation
  /// dtype. Entries of other tokens are untouched. The batch must have no targets.
  void likeliest(const RowBatch& batch, const std::vector<std::int64_t>& samples, double temperature, bool share_prefix,
                 const at::Tensor& ids, const at::Tensor& logprobs);

  /// Computes the same log-probabilities together with the head's backward pass, for a loss whose gradient needs only
  /// single tokens (without top-k, top-p, float64 and value head; needs `options.keep`). `backward` without arguments
  /// completes the backward pass.
  void forward(const RowBatch& batch, const std::vector<std::int64_t>& samples, const model::TokenScoring& scoring,
               const ForwardOptions& options, const at::Tensor& out, const TokenLoss& loss);
  /// Whether this model and scoring support a forward pass with a TokenLoss.
  bool takes_token_loss(const model::TokenScoring& scoring) const;

  /// Returns the next-token logits [T, V] (values [T, 1]) of one sequence, in the accumulation dtype. For inspection
  /// and tests, not for training.
  at::Tensor logits(const at::Tensor& token_ids);

  /// Adds to the gradients, from the gradients of the outputs of the last forward pass (with keep), read at its tokens
  /// to score.
  void backward(const TokenOutputs& d_outputs);
  /// Completes the backward pass after a forward pass with a loss.
  void backward();

  /// From now on backward passes, of rows that share no prompts, add the gradient of this loss of the experts in every
  /// layer: `coefficient` is that of one sequence; 0: none.
  void balance_experts(double coefficient) { balance_.coefficient = coefficient; }
  /// The sum of this loss over the sequences of the backward passes since the last call, as a mean over the layers with
  /// experts.
  double take_balance_loss();

  /// Must be called before passes over rows that other ranks have generated; see trainer/kept_moves.h.
  void move_kept(const RowBatch& batch, const std::vector<KeptMove>& moves);

  void zero_grad();
  /// Announces that the next backward pass is the last one of this global batch (with sharded gradients: of this
  /// block), so that sums over all ranks may begin during it. If there is no such pass, the sums are formed later. Does
  /// nothing if sums wait for the end of the backward pass.
  void begin_sum() { last_backward_ = gradients_.sums_beside(); }
  /// After a failure of this rank, joins the sum that other ranks have begun or will begin.
  void abandon_sum() { gradients_.abandon(); }
  /// Ends a gradient block: the gradients since the end of the previous block are one term of the sum of all blocks,
  /// which are added along a fixed tree (distributed/gradient_sums.h). Without any call there is one block.
  void end_block();
  /// Adds the blocks of all ranks, clips to `max_grad_norm` (none if <= 0) and updates the weights; a non-finite norm
  /// changes nothing.
  OptimizerStep step(const ops::AdamWSettings& settings, double max_grad_norm);
  /// The norm of grads() on this process.
  double grad_norm() const { return gradients_.flat_norm(); }
  /// Whether grads() has no infinity and no NaN, in any slice of the model.
  bool grads_are_finite() { return gradients_.are_finite(); }
  /// The number of tokens so far whose activations were reused from generation (model/kept_activations.h).
  std::int64_t reused_tokens() const { return reused_tokens_; }

  /// The range of the flat buffers of trained parameters that this process updates: all of it unless there are other
  /// ranks.
  distributed::Shard shard() const { return gradients_.shard(); }
  /// Gradients and optimizer state as flat buffers, created at first use: the gradients of all trained parameters
  /// (after a step those of this process's last block, or nothing if gradients are sharded), and the moments of the
  /// shard.
  const at::Tensor& grads() { return gradients_.flat(); }
  const at::Tensor& exp_avg();
  const at::Tensor& exp_avg_sq();
  std::int64_t optimizer_steps() const { return optimizer_steps_; }
  void set_optimizer_steps(std::int64_t steps) { optimizer_steps_ = steps; }

 private:
  bool values() const { return model_->config().value_head; }
  void update(const ops::AdamWSettings& settings, double scale);
  at::Tensor zero_moments(std::optional<at::ScalarType> type) const;
  void forward_body(const RowBatch& batch, const std::vector<std::int64_t>& samples, const ForwardOptions& options);
  std::vector<model::KeptActivations::Node> kept_nodes() const;
  at::Tensor token_rows() const;
  at::Tensor token_places() const;
  void backward_body(const at::Tensor& dh);
  std::shared_ptr<model::DecoderModel> model_;
  Gradients gradients_;
  StateTypes state_;
  at::Tensor exp_avg_, exp_avg_sq_;
  std::int64_t optimizer_steps_ = 0, reused_tokens_ = 0;
  ops::ExpertBalance balance_;
  model::LmHead head_;
  model::ValueHead value_head_;
  // of the last forward pass with keep
  PackedBatch packed_;
  at::Tensor h_;
  std::unique_ptr<model::ActivationSource> activations_;
  model::TokenScoring scoring_;
  bool has_unfiltered_ = false, has_entropy_ = false;
  std::int64_t targets_ = 1;  // K, pairs per token to score
  bool pending_ = false;
  bool head_done_ = false;  // its backward pass, by a forward pass with a loss
  bool last_backward_ = false;
};

}  // namespace nemo_rl::trainer
