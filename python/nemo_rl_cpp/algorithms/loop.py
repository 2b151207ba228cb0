"""The training loop of GRPO, DAPO, ProRLv2, distillation, supervised fine-tuning and PPO, on one page.

A feature that a configuration enables is a different component of the run; the loop stays the same.
`algorithms/build.py` describes and combines the components. GRPO is this loop with a critic that does nothing and a
single epoch."""

from typing import TYPE_CHECKING

from nemo_rl_cpp.algorithms import step
from nemo_rl_cpp.algorithms.hooks import StepResult
from nemo_rl_cpp.rollouts.batches import add_logprobs, build_train_batch

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.build import TrainingRun


def train_loop(run: "TrainingRun") -> None:
    """Repeat until the run ends: collect rollouts for the next step, train the policy on them, and call the hooks."""
    config, loop, state, refit = run.config, run.config.loop, run.state, run.collector.refit
    start = StepResult(state)
    for hook in run.before_training:
        hook(start)
    with run.collector:  # closing it ends the generation for later steps
        while not state.finished:
            with run.timer.step(state.step + 1) as timer:
                collected = run.collector.collect(timer)
                samples, metrics = collected.samples, collected.metrics
                with timer("data_processing"):
                    batch = build_train_batch(
                        samples, pad_token_id=run.tokenizer.pad_token_id, overlong_filtering=loop.overlong_filtering,
                        divisible_by=config.policy.make_sequence_length_divisible_by, is_trained=run.algorithm.is_trained,
                    )  # fmt: skip
                run.critic.add_values(batch, timer)
                with timer("policy_and_reference_logprobs"):
                    refit.verify_before_training()
                    metrics |= add_logprobs(run.policy, batch, config.loss_fn, loop, weight_version=state.step)
                    run.teachers.add_logprobs(batch, samples)
                    metrics |= step.mask_by_logprob_error(batch, loop.seq_logprob_error_threshold)
                    if run.algorithm.needs_tokens:
                        step.require_valid_tokens(samples, batch, loop)
                with timer("advantage_calculation"):
                    metrics |= run.advantages.add(batch)
                    metrics |= step.overwrite_advantages(batch, samples.message_log, loop.message_advantages)
                    metrics |= step.select_tokens(batch, config.loss_fn, loop.seed, state.step)
                metrics |= step.train_epochs(run, batch, timer)
                with timer("metrics"):
                    result = step.step_result(run, collected, batch, metrics)
            state.advance(loop.num_prompts_per_step, int(batch.valid_mask.sum()))
            for _ in range(collected.finished_epochs):
                state.next_epoch()
            for hook in run.after_step:
                hook(result)
