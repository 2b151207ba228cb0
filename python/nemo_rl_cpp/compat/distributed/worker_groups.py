"""NeMo RL's worker groups: the house's, with the calls that only code for several workers makes."""

from collections.abc import Callable
from typing import Any

from nemo_rl_cpp.distributed import worker_groups as house
from nemo_rl_cpp.distributed.futures import Future, get


class RayWorkerBuilder:
    """Constructs a worker of `worker_class` with fixed arguments when a group starts."""

    def __init__(self, worker_class: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.worker_class = worker_class
        self.args = args
        self.kwargs = kwargs

    def __call__(self, ranks: Any = None) -> Any:
        return self.worker_class(*self.args, **self.kwargs)


class RayWorkerGroup(house.RayWorkerGroup):
    """The workers of a cluster under one handle. Results come as futures; `get_all_worker_results` unwraps them."""

    def run_all_workers_multiple_data(
        self, method_name: str, *args: list[Any], common_kwargs: dict[str, Any] | None = None, **kwargs: list[Any]
    ) -> list[Future]:
        """Calls the method on every worker with its own entry of each list.

        Raises ValueError when a list has not one entry a worker.
        """
        for values in (*args, *kwargs.values()):
            if len(values) != self.dp_size:
                raise ValueError(f"{method_name} needs one entry a worker ({self.dp_size}), but got {len(values)}")
        return [
            self.run_single_worker_single_data(
                method_name,
                i,
                *(values[i] for values in args),
                **{k: v[i] for k, v in kwargs.items()},
                **(common_kwargs or {}),
            )
            for i in range(self.dp_size)
        ]

    def get_all_worker_results(self, futures: list[Future]) -> list[Any]:
        """The values behind the futures."""
        return get(futures)
