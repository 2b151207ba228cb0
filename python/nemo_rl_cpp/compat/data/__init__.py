"""Tokenizer, data sets, processors and the loader that feeds prompts to the training loop."""

from nemo_rl_cpp.config.data import DataConfig, EvalDataConfig
from nemo_rl_cpp.config.data import DatasetConfig as ResponseDatasetConfig
from nemo_rl_cpp.config.data import EvalDataConfig as EvalDataConfigType
