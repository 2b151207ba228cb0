"""Re-export the types of a data processor."""

from nemo_rl_cpp.data.interfaces import DatumSpec, LLMMessageLogType, TaskDataProcessFnCallable, TaskDataSpec
