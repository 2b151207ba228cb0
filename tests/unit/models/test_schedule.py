import json

import pytest
import torch
from nemo_rl_cpp.config.optimizer import MegatronOptimizerConfig, MegatronSchedulerConfig, SchedulerStage
from nemo_rl_cpp.models.policy.updates import MegatronLearningRate, TorchLearningRate

WARMUP = [
    SchedulerStage(name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 0.1, "end_factor": 1.0, "total_iters": 5}),
    SchedulerStage(name="torch.optim.lr_scheduler.ConstantLR", kwargs={"factor": 1.0, "total_iters": 10**10}),
    SchedulerStage(milestones=[5]),
]  # fmt: skip
COSINE = [SchedulerStage(name="CosineAnnealingLR", kwargs={"T_max": 8, "eta_min": 1e-5})]


def torch_rates(schedule, steps):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    make = torch.optim.lr_scheduler
    stages = [getattr(make, s.name.rpartition(".")[2])(optimizer, **s.kwargs) for s in schedule if s.name]
    scheduler = stages[0] if len(stages) == 1 else make.SequentialLR(optimizer, stages, schedule[-1].milestones)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", [WARMUP, COSINE, []])
def test_configured_torch_schedules_give_the_learning_rates_of_torch_even_after_a_resume(schedule):
    expected = torch_rates(schedule, 12) if schedule else [1e-3] * 12
    ours = TorchLearningRate(1e-3, 0.01, schedule)
    rates = []
    for step in range(12):
        if step in (3, 7):
            state = json.loads(json.dumps(ours.state_dict()))
            ours = TorchLearningRate(1e-3, 0.01, schedule)
            ours.load_state_dict(state)
        rates.append(ours.lr)
        ours.step()
    assert rates == expected and ours.weight_decay == 0.01


def megatron(style, total_steps=None, **changes):
    values = dict(lr_decay_style=style, lr_decay_iters=10, lr_warmup_iters=2, lr_warmup_init=0.5, start_weight_decay=0.0, end_weight_decay=0.2,
                  weight_decay_incr_style="linear")  # fmt: skip
    optimizer = MegatronOptimizerConfig(lr=1.0, min_lr=0.1)
    return MegatronLearningRate(optimizer, MegatronSchedulerConfig(**{**values, **changes}), total_steps)


@pytest.mark.parametrize(
    "style,at_six,at_twelve",
    [("constant", 1.0, 1.0), ("linear", 0.1 + 0.9 * 0.5, 0.1), ("cosine", 0.1 + 0.9 * 0.5, 0.1)],
)
def test_megatron_learning_rate_schedule_warms_up_and_decays(style, at_six, at_twelve):
    ours = megatron(style)
    rates, decays = [], []
    for _ in range(13):
        rates.append(ours.lr)
        decays.append(ours.weight_decay)
        ours.step()
    assert rates[:3] == [0.5, 0.75, 1.0]
    assert rates[6] == pytest.approx(at_six)
    assert rates[12] == pytest.approx(at_twelve)
    assert decays[5] == pytest.approx(0.1) and decays[12] == pytest.approx(0.2)


def test_learning_rate_and_weight_decay_schedules_span_the_run_by_default():
    ours, whole = (megatron("linear", 20), megatron("linear", 20, lr_decay_iters=None))
    for _ in range(10):
        ours.step(), whole.step()
    assert ours.lr == pytest.approx(0.1) and ours.weight_decay == pytest.approx(0.1)
    assert whole.lr == pytest.approx(0.1 + 0.9 * 10 / 18)


def test_learning_rate_schedule_resumes_from_the_state_of_torch_schedulers_in_older_checkpoints():
    """These checkpoints hold the state of each torch scheduler; the outermost one's last_epoch is the number of
    steps."""
    ours = TorchLearningRate(1e-3, 0.01, WARMUP)
    ours.load_state_dict({"lr": 1e-3, "scheduler": {"last_epoch": 7}, "stages": [{"last_epoch": 4}, {"last_epoch": 2}]})
    assert ours.lr == torch_rates(WARMUP, 8)[7]
