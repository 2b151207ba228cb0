"""Re-export data processors and their registry."""

from nemo_rl_cpp.data.processors import (
    PROCESSOR_REGISTRY,
    math_data_processor,
    math_hf_data_processor,
    register_processor,
)
