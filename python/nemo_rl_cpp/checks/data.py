"""Check data sets, prompts, ground truths and the chat template, and import users' environments and functions."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from nemo_rl_cpp.config.data import plain_sections, too_few_rows
from nemo_rl_cpp.config.env import ENV_REGISTRY
from nemo_rl_cpp.config.master import TrainMasterConfig, WholeConfig
from nemo_rl_cpp.data.chat_template import ChatTemplateError, choose_template
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.data.tokenizer import Tokenizer, get_tokenizer
from nemo_rl_cpp.dotted_names import LoadingError, import_object, is_dotted
from nemo_rl_cpp.environments.loading import RewardFunctions, environment_class, environment_target
from nemo_rl_cpp.errors import Finding
from nemo_rl_cpp.hub import sources


def check(config: WholeConfig) -> Iterator[Finding]:
    """Yield problems with the chat template and with every row of local data sets; others are checked by the run."""
    from .rows import check_rows  # loads numpy, so only after the other checks

    tokenizer, findings = _tokenizer(config)
    yield from findings
    counts: dict[str, int | None] = {}
    for where, section in plain_sections(config.data):
        counts[where] = yield from check_rows(config, where, section, tokenizer)
    if isinstance(config, TrainMasterConfig):
        yield from _check_counts(config, {where: n for where, n in counts.items() if where.startswith("data.train")})


def _check_counts(config: TrainMasterConfig, counts: dict[str, int | None]) -> Iterator[Finding]:
    """Yield an error for each data loader that would have fewer rows than a batch. `counts` maps the dotted key of each
    training data set to its number of rows, None if unknown."""
    batch_size = config.loop.prompts_per_round
    if config.data.use_multiple_dataloader:
        batch_size = config.data.num_prompts_per_dataloader or batch_size
    else:  # one loader for all data sets together
        known = [count for count in counts.values() if count is not None]
        counts = {"data.train": sum(known) if len(known) == len(counts) else None}
    for where, count in counts.items():
        if count and (text := too_few_rows(count, batch_size, config.algorithm)):
            yield Finding("error", where, text)


def _tokenizer(config: WholeConfig) -> tuple[Tokenizer | None, list[Finding]]:
    """Return (tokenizer with the configured chat template, problems with this template). The tokenizer is None if it is
    not on this machine or cannot be read."""
    training = isinstance(config, TrainMasterConfig)
    section, prefix = (config.policy.tokenizer, "policy.tokenizer") if training else (config.tokenizer, "tokenizer")
    name, value, key = section.name, section.chat_template, f"{prefix}.chat_template"
    try:
        if name == sources.TINY_RANDOM:
            tokenizer = tiny_tokenizer()
            tokenizer.chat_template = choose_template(value, tokenizer.chat_template, key)
            return tokenizer, []
        folder = sources.local_folder(name if training else sources.find_policy_weights(name))
        if folder is None or not (folder / "tokenizer.json").is_file():
            # a bare word may name a template of a tokenizer that is not on this machine yet
            if value is None or "{" in value or "/" in value or "." in value or not value.strip():
                choose_template(value, None, key)
            return None, []
        plain = {"name": str(folder), "chat_template_kwargs": section.chat_template_kwargs, "chat_template": value}
        return get_tokenizer(plain, section=prefix), []
    except (ChatTemplateError, FileNotFoundError) as error:
        return None, [Finding("error", key, str(error).removeprefix(key).lstrip(": "))]
    except Exception:  # noqa: BLE001 - the check of the model's files finds damaged ones
        return None, []


class Lengths(NamedTuple):
    """The mean number of tokens of the prompts of a run's training data, and of the answers that these prompts contain
    in supervised fine-tuning."""

    prompt: float
    answer: float


def mean_lengths(config: TrainMasterConfig) -> Lengths | None:
    """Return the mean lengths over up to 64 rows of each training data set; None if one cannot be read quickly."""
    from .rows import lengths_of  # loads numpy

    tokenizer, _ = _tokenizer(config)
    sections = [section for where, section in plain_sections(config.data) if where.startswith("data.train")]
    found = [None if tokenizer is None else lengths_of(section, tokenizer) for section in sections]
    rows = [] if None in found else [row for each in found for row in each]
    return Lengths(*(sum(each) / len(rows) for each in zip(*rows))) if rows else None


# -- names given by the user ------------------------------------------------------------------------------------------


def check_environments(config: WholeConfig) -> Iterator[Finding]:
    """Import the user's own environments, reward functions, data set classes, estimator and loss, which may import
    torch. Yield an error for each import that fails."""
    training = isinstance(config, TrainMasterConfig)
    named: list[tuple[str, object, str]] = []
    if training:
        named.append((f"{config.algorithm}.adv_estimator.name", config.loop.adv_estimator.name, "advantage estimator"))
        named.append(("loss_fn.name", config.loss_fn.name, "loss"))
        named.append(("data.custom_dataloader", config.data.custom_dataloader, "data loader"))
    sections = plain_sections(config.data)
    named += [(f"{key}.dataset_name", section.get("dataset_name"), "data set class") for key, section in sections]
    for key, name, what in named:
        if is_dotted(name):
            try:
                import_object(name, what)
            except LoadingError as error:
                yield Finding("error", key, f"cannot be used: {error}")
    for key, section in sections if training and config.algorithm != "sft" else ():
        if section.get("env_name") is None:
            yield Finding("error", f"{key}.env_name", "is missing: name the section of env that scores the responses")
    for name in dict.fromkeys(section.get("env_name") for _, section in sections):
        if name is None or name not in config.env:
            continue
        try:
            if name == "reward_functions":
                yield from _check_rewards(config, config.env[name] or {})
            elif name not in ENV_REGISTRY or not environment_target(name).startswith("nemo_rl_cpp."):
                environment_class(name)
        except ValueError as error:
            yield Finding("error", f"env.{name}", f"cannot be used: {error}")


def _check_rewards(config: WholeConfig, section: Mapping[str, object]) -> Iterator[Finding]:
    """Import the reward functions that `section`, env.reward_functions, names. Yield an error if the advantage estimator
    gdpo cannot use their rewards. Raise ValueError for an invalid section."""
    functions, key = RewardFunctions.of(section).functions, "env.reward_functions"
    estimator = getattr(getattr(config, "grpo", None), "adv_estimator", None)
    if estimator is None or estimator.name != "gdpo":
        return
    if len(functions) < 2:
        needs = "names one function, but adv_estimator.name gdpo weighs the parts of a reward: name at least two, or take another estimator"
        yield Finding("error", f"{key}.functions", needs)
    elif not section.get("as_parts"):
        needs = "must be true with adv_estimator.name gdpo, whose parts are the functions' own rewards"
        yield Finding("error", f"{key}.as_parts", needs)
