"""The sections of distillation and of supervised fine-tuning: teachers, losses and loops."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import ConfigDict, PrivateAttr

from nemo_rl_cpp.dotted_names import is_user_defined

from .base import Fraction, Int, NonNegative, Positive, Real, Section, key, section
from .cluster import engines_of
from .errors import Report
from .loop import AdvEstimatorConfig, GRPOEstimator, LoopConfig, OnePassLoop
from .loss import ClippedPGLossConfig, LossName

if TYPE_CHECKING:
    from .master import DistillationMasterConfig, SFTMasterConfig, TaughtMasterConfig


def absolute_folder(model_name: str) -> str:
    """Return the absolute path if `model_name` is an existing folder, because a worker may have a different working
    directory. Return other names unchanged."""
    folder = Path(model_name).expanduser()
    return str(folder.absolute()) if folder.exists() else model_name


class FullDistillationConfig(Section):
    """Distillation over the whole vocabulary, which is not supported."""

    model_config = ConfigDict(extra="allow")


class NonColocatedTeachersConfig(Section):
    """Devices of the teachers. The section has no effect: teachers are always on the policy's devices."""

    model_config = ConfigDict(extra="allow")


class OnPolicyDistillationConfig(Section):
    """Settings of teachers that score the policy's samples, for `adv_estimator.name: opd` of a GRPO or PPO run."""

    is_switched = True
    enabled: bool = key(False, "Load the teachers and score the responses with them.")
    teacher_model_by_agent_name: dict[str, str] = {}
    """Model of each teacher, by task. A task is the name of a dataset (in NeMo RL, of an agent)."""
    default_teacher_alias: str | None = None
    """Key of teacher_model_by_agent_name for tasks without their own. null: the only teacher, if there is just one."""
    strict_agent_name_match: bool = key(False, "End the run with an error if a task has no teacher of its name.")
    non_colocated_teachers: NonColocatedTeachersConfig | None = section(NonColocatedTeachersConfig)
    full: FullDistillationConfig | None = section(FullDistillationConfig)

    def models(self) -> dict[str, str]:
        """Return {task: model of its teacher}; empty if `enabled` is false. Local folders are absolute paths."""
        if not self.enabled:
            return {}
        return {task: absolute_folder(name) for task, name in self.teacher_model_by_agent_name.items()}

    @property
    def default_teacher(self) -> str | None:
        """The task, a key of teacher_model_by_agent_name, whose teacher also scores the samples of tasks without a key
        there. None: these samples have no teacher."""
        names = list(self.teacher_model_by_agent_name)
        if self.strict_agent_name_match:
            return None
        return self.default_teacher_alias or (names[0] if len(names) == 1 else None)


class TeacherConfig(Section):
    """Settings of the teacher of a distillation run. It has the policy's precision, batch sizes and maximum sequence
    length. NeMo RL's other keys of this section are accepted and ignored."""

    model_config = ConfigDict(extra="allow")
    model_name: str
    """Teacher model: a local folder, a GGUF file, a packaged model, or a name on the Hugging Face Hub. It must have the
    policy's tokenizer. With base_url: the model's name on the server."""
    backend: Literal["native", "hf"] = "native"
    """Implementation of a teacher that the run loads. native: the C++ core. hf: transformers, which supports further
    architectures."""
    base_url: str | None = None
    """URL of a server (vLLM, nemo-rl-cpp serve) that scores token ids: http://host:8000/v1. null: the run loads it."""
    api_key_env: str | None = key(None, "Environment variable with the API key of the server. null: no key is sent.")

    @property
    def is_outside(self) -> bool:
        """Whether a server or transformers, not the native core in the policy's process, computes the teacher's
        scores."""
        return self.base_url is not None or self.backend != "native"


class DistillationLossConfig(ClippedPGLossConfig):
    """Settings of a distillation run's loss: a divergence between policy and teacher, as a policy-gradient loss."""

    reference_policy_kl_penalty: NonNegative = 0.0
    kl_type: Literal["reverse", "forward", "mixed", "jensen"] = "reverse"
    """Divergence between student and teacher to minimise. It is estimated on the sampled tokens."""
    mixed_kl_weight: Fraction = 0.5
    """kl_type mixed: weight of the forward KL. The reverse KL has the weight 1 - mixed_kl_weight."""
    zero_outside_topk: bool = False
    """With distillation.topk_logits_k and kl_type reverse or mixed: treat the teacher's probability of tokens outside
    its top k as 0. false: compare the distributions over the k tokens alone."""
    max_teacher_ratio: Real = key(10.0, gt=1)
    """kl_type forward or mixed: upper bound of the ratio of the teacher's and the student's probability of a token."""


class DistillationEstimatorConfig(AdvEstimatorConfig):
    """Settings of the advantage estimator of a distillation run, which converts the teacher's scores to advantages."""

    name: GRPOEstimator = "opd"
    """Advantage estimator: opd, or your own class or function by its dotted name, for example my_module.MyEstimator."""


class DistillationConfig(LoopConfig):
    """Settings of the training loop of a distillation run. Keys that are also in `grpo` have the same meaning."""

    section_name = "distillation"
    num_prompts_per_step: Positive = 128
    num_generations_per_prompt: Positive = 1
    max_num_epochs: Positive = 10
    max_num_steps: Positive = 1000
    val_period: Int = 20
    val_batch_size: Positive | None = 64
    max_val_samples: Positive | None = 512
    topk_logits_k: Positive | None = None
    """Number of most likely tokens per position on which teacher and student are compared. null: the sampled token."""
    topk_of: Literal["teacher", "student"] = "teacher"
    """With topk_logits_k: whether the tokens compared are the teacher's or the student's most likely ones."""
    advantage_clip_low: Real | None = key(None, "Lower bound of the advantages. null: none.")
    advantage_clip_high: Real | None = key(None, "Upper bound of the advantages. null: none.")
    adv_estimator: DistillationEstimatorConfig = section(DistillationEstimatorConfig)


def check_teachers(config: TaughtMasterConfig | DistillationMasterConfig, report: Report) -> None:
    estimator, key = config.loop.adv_estimator, f"{config.algorithm}.adv_estimator"
    taught = estimator.name == "opd"
    for name in ("proximal_teacher_alpha", "subtract_global_baseline", "outcome_advantage_weight"):
        if not taught and getattr(estimator, name) != type(estimator).model_fields[name].default:
            text = f"is read by adv_estimator.name opd only, not {estimator.name}: leave it out"
            report.add(f"{key}.{name}", text, f"{key}.name")
    if config.algorithm != "distillation":
        _check_on_policy_distillation(config, taught, report)
    else:
        if not taught and not is_user_defined(estimator.name):
            report.add(f"{key}.name", f"must be opd, which reads the teacher's scores, not {estimator.name}")
        if config.distillation.topk_logits_k is not None:
            _check_topk(config, report)
        _check_outside(config, report)
    if config.teachers and config.policy.backend != "native":
        text = f"is {config.policy.backend}, but a teacher is scored by the native core: set it to native"
        report.add("policy.backend", text)


def _check_outside(config: DistillationMasterConfig, report: Report) -> None:
    teacher, temperature = config.teacher, config.policy.generation.temperature
    if teacher.base_url is not None and temperature not in (None, 1.0):
        text = f"is scored by a server at temperature 1: set it to 1, not {temperature:g}"
        report.add("policy.generation.temperature", text, "teacher.base_url")
    if teacher.base_url is not None and teacher.backend != "native":
        report.add("teacher.backend", "is for a teacher that is loaded: leave it out with teacher.base_url")
    if teacher.is_outside and config.candidates is not None:
        text = "needs a teacher of the native core: leave teacher.base_url and teacher.backend out, or write null"
        report.add("distillation.topk_logits_k", text, "teacher.model_name")


def _check_topk(config: DistillationMasterConfig, report: Report) -> None:
    loss, generation, name = config.loss_fn, config.policy.generation, "distillation.topk_logits_k"
    where = f"is {config.distillation.topk_logits_k}, which "
    if config.cluster.device != "cpu":
        text = f"{where}works on the CPU only: write null, or set cluster.device to cpu"
        report.add(name, text, "cluster.device")
    if loss.kl_type == "jensen":
        report.add(name, f"{where}goes with the kl_type forward, reverse and mixed, not jensen", "loss_fn.kl_type")
    if loss.zero_outside_topk and config.distillation.topk_of == "student":
        text = "is for the teacher's tokens: set distillation.topk_of to teacher"
        report.add("loss_fn.zero_outside_topk", text, name)
    for filtered in ("top_p", "top_k"):
        if getattr(generation, filtered) not in (None, -1, 0, 1.0):
            text = f"{where}compares whole distributions: set policy.generation.{filtered} to null"
            report.add(name, text, f"policy.generation.{filtered}")
    for term, off in (("entropy_coef", 0), ("reference_policy_kl_penalty", 0), ("top_entropy_quantile", 1)):
        if getattr(loss, term) != off:
            report.add(f"loss_fn.{term}", f"is for the sampled token, not for {name}: set it to {off}", name)


def _check_on_policy_distillation(config: TaughtMasterConfig, taught: bool, report: Report) -> None:
    teaching, own = config.on_policy_distillation, "on_policy_distillation"
    chosen, estimator = f"{config.algorithm}.adv_estimator.name", config.loop.adv_estimator.name
    if not config.teachers:
        if taught:
            text = f"is opd, which needs a teacher: set {own}.enabled=true and {own}.teacher_model_by_agent_name"
            report.add(chosen, text, f"{own}.enabled")
        elif teaching is not None and teaching.enabled:
            report.add(f"{own}.teacher_model_by_agent_name", "names no teacher: give one, or set enabled to false")
        return
    if not taught and not is_user_defined(estimator):
        text = f"loads teachers that adv_estimator.name {estimator} does not ask: set {chosen} to opd, or this to false"
        report.add(f"{own}.enabled", text, chosen)
    alias = teaching.default_teacher_alias
    if alias is not None and alias not in teaching.teacher_model_by_agent_name:
        names = ", ".join(teaching.teacher_model_by_agent_name)
        report.add(f"{own}.default_teacher_alias", f"is {alias}, but the teachers are {names}")


# ---- supervised fine-tuning


class SFTLossConfig(ClippedPGLossConfig):
    """Settings of the supervised loss on the answers in the dataset."""

    name: LossName = "nll"
    """Loss. nll: the negative log-likelihood, or the dotted name of your class or function, as my_module.MyLoss."""
    reference_policy_kl_penalty: NonNegative = 0.0


class SFTConfig(OnePassLoop):
    """Settings of supervised fine-tuning's loop. Each step trains on policy.train_global_batch_size rows."""

    section_name: ClassVar[str] = "sft"
    max_num_steps: Positive = 60
    val_batches: Int = key(8, "Number of batches per validation. 0 or less: all.")
    val_global_batch_size: Positive = key(32, "Number of rows in a validation batch.")
    val_micro_batch_size: Positive = key(1, "Number of rows in a validation micro-batch.")
    val_at_start: bool = True

    # values of keys that other training loops have
    num_generations_per_prompt: ClassVar[int] = 1
    max_rollout_turns: ClassVar[int] = 1
    val_start_at: ClassVar[int] = -1
    stop_at_validation_metric: ClassVar[None] = None
    stop_at_validation_threshold: ClassVar[None] = None
    overlong_filtering: ClassVar[bool] = False
    skip_reference_policy_logprobs_calculation: ClassVar[bool] = False
    seq_logprob_error_threshold: ClassVar[None] = None
    adv_estimator: ClassVar[AdvEstimatorConfig] = AdvEstimatorConfig.model_construct(name="none")
    _rows: int = PrivateAttr(1)

    num_prompts_per_step = prompts_per_round = property(attrgetter("_rows"))
    """The number of rows per step: policy.train_global_batch_size."""
    val_batch_size = property(attrgetter("val_global_batch_size"))

    @property
    def max_val_samples(self) -> int | None:
        return self.val_batches * self.val_global_batch_size if self.val_batches > 0 else None


def check_sft(config: SFTMasterConfig, report: Report) -> None:
    """Report losses and separate engines, which supervised fine-tuning does not support."""
    if config.loss_fn.name != "nll" and not is_user_defined(config.loss_fn.name):
        text = f"must be nll, or a loss of yours, not {config.loss_fn.name}: answers of a file have no advantages"
        report.add("loss_fn.name", text)
    if engines_of(config) or config.policy.generation.runs_vllm:
        report.add("policy.generation", "asks for engines, but nothing is generated: leave the section out")
