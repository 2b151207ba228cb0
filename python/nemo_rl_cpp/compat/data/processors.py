"""Processors: a row of a data set to a tokenised prompt with what its environment needs."""

from nemo_rl_cpp.data.interfaces import TokenizerType as TokenizerLike
from nemo_rl_cpp.data.processors import (
    FILLS_A_PLACE,
    PROCESSOR_REGISTRY,
    PROMPT_MAKERS,
    Entry,
    Prompt,
    PromptMaker,
    math_data_processor,
    math_hf_data_processor,
    multichoice_qa_processor,
    raw_completion_data_processor,
    register_processor,
    system_message,
)
