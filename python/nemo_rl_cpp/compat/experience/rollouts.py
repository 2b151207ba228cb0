"""Rollouts under NeMo RL's names: those of the house, and those in which every sample goes its own way."""

from nemo_rl_cpp.compat.experience.async_rollouts import (
    async_generate_response_for_sample_turn,
    generate_responses_async,
    run_async_multi_turn_rollout,
    run_sample_multi_turn_rollout,
)
from nemo_rl_cpp.experience.rollouts import repeat_prompts, run_multi_turn_rollout
from nemo_rl_cpp.experience.turns import attach_responses, calculate_rewards, generate_responses
