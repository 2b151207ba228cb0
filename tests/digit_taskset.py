"""A task set of the package `verifiers`, as users write them. The correct response to every prompt is "7"."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["DigitTaskset"]


class DigitData(vf.TaskData):
    answer: str


class DigitTask(vf.Task[DigitData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def is_digit(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.isdigit())


class DigitTaskset(vf.Taskset[DigitTask, vf.TasksetConfig]):
    def load(self) -> Iterator[DigitTask]:
        for number in range(64):
            yield DigitTask(DigitData(prompt=f"{number % 10}=", answer="7"), self.config.task)
