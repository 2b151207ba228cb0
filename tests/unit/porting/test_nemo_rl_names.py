"""The public names of NeMo RL exist in `nemo_rl_cpp.compat` under the same module paths, with the same parameters, defaults
and fields; those that the guides print exist in `nemo_rl_cpp`, too.

`nemo_rl_interface.json` lists the first: module -> name -> signature of a function, or fields and methods of a class;
`guide_names.json` the second. docs/porting-from-nemo-rl.md tells users about `DIFFERENT`.
"""

import ast
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INTERFACE = json.loads((HERE / "nemo_rl_interface.json").read_text())
GUIDES = json.loads((HERE / "guide_names.json").read_text())

# name -> why it differs
DIFFERENT = {
    "algorithms.logits_sampling_utils.apply_top_k_top_p": "a constant is written by its name in the table",
    "data.llm_message_utils.add_loss_mask_to_message_log": "the default is a tuple: a shared list could be changed",
    "utils.timer.Timer._REDUCTION_FUNCTIONS": "the same names over other functions",
}


def modules():
    return sorted(INTERFACE)


def load(module):
    return importlib.import_module(f"nemo_rl_cpp.compat.{module}")


def wanted_parameters(signature):
    """(name, kind, default as text or None) of every parameter of `(a, b=1, *, c, **kw)`."""
    arguments = ast.parse(f"def f{signature}: pass").body[0].args
    plain = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(plain) - len(arguments.defaults)) + [ast.unparse(d) for d in arguments.defaults]
    found = [(a.arg, "positional", d) for a, d in zip(plain, defaults)]
    found += [
        (a.arg, "keyword", ast.unparse(d) if d else None) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults)
    ]
    return found, arguments.vararg is not None, arguments.kwarg is not None


def differences(function, signature):
    """What a call that fits `signature` could not do with `function`."""
    wanted, varargs, varkwargs = wanted_parameters(signature.removeprefix("async "))
    have = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    by_name = {p.name: p for p in have}
    order = [p.name for p in have]
    problems = []
    for position, (name, kind, default) in enumerate(wanted):
        if name not in by_name:
            problems.append(f"no parameter {name}")
            continue
        parameter = by_name[name]
        if kind == "positional" and (order.index(name) != position or parameter.kind is parameter.KEYWORD_ONLY):
            problems.append(f"{name} is not parameter number {position}")
        if default is not None and parameter.default is parameter.empty:
            problems.append(f"{name} has no default")
        elif default is not None and repr(parameter.default) != default:
            problems.append(f"{name}={parameter.default!r} instead of {default}")
    names = {name for name, _, _ in wanted}
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY)
    problems += [
        f"{p.name} is required" for p in have if p.name not in names and p.kind in plain and p.default is p.empty
    ]
    if varargs and not any(p.kind is p.VAR_POSITIONAL for p in have):
        problems.append("no *args")
    if varkwargs and not any(p.kind is p.VAR_KEYWORD for p in have):
        problems.append("no **kwargs")
    if signature.startswith("async ") and not (
        inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    ):
        problems.append("is not async")
    return problems


FOLLOWS = {"use_importance_sampling_correction"}
"""Keys whose null follows from others, and is NeMo RL's default where these are at theirs."""


def field_problem(cls, field):
    name, given, default = field.partition("=")
    known = getattr(cls, "model_fields", {})
    if name in known:
        info = known[name]
        value = info.default_factory() if info.default_factory is not None else info.default
        if name in FOLLOWS and value is None:
            return None
        # a section whose default is an absent mapping may be filled with what an absent one means
        return (
            f"{name}: {value!r} instead of {default}"
            if given and default != "None" and repr(value) != default
            else None
        )
    if hasattr(cls, "__members__"):
        member = cls.__members__.get(name)
        return None if member is not None and repr(member.value) == default else f"no member {field}"
    annotated = any(name in vars(base).get("__annotations__", {}) or name in vars(base) for base in cls.__mro__)
    return None if annotated or name in inspect.get_annotations(cls) else f"no field {name}"


@pytest.mark.parametrize("module", modules())
def test_module_has_the_names_with_their_signatures(module):
    found = load(module)
    problems = []
    for name, entry in INTERFACE[module].items():
        path = f"{module}.{name}"
        thing = getattr(found, name, None)
        if thing is None:
            problems.append(f"{path}: missing")
        elif path in DIFFERENT:
            continue
        elif isinstance(entry, str):
            problems += [f"{path}: {problem}" for problem in differences(thing, entry)]
        else:
            problems += class_problems(path, thing, entry)
    assert not problems, "\n".join(problems)


def class_problems(path, cls, entry):
    problems = []
    for field in entry.get("fields", ()):
        if f"{path}.{field.partition('=')[0]}" not in DIFFERENT and (problem := field_problem(cls, field)):
            problems.append(f"{path}: {problem}")
    for method, signature in entry.get("methods", {}).items():
        attribute = inspect.getattr_static(cls, method, None)
        if attribute is None:
            problems.append(f"{path}.{method}: missing")
        elif signature == "property":
            if not isinstance(attribute, property):
                problems.append(f"{path}.{method}: is no property")
        else:
            problems += [f"{path}.{method}: {problem}" for problem in differences(getattr(cls, method), signature)]
    return problems


def test_every_difference_is_a_name_of_the_table():
    names = {f"{module}.{name}" for module, entries in INTERFACE.items() for name in entries}
    assert {path for path in DIFFERENT if path not in names} == {"utils.timer.Timer._REDUCTION_FUNCTIONS"}


@pytest.mark.parametrize("module, names", [
    ("algorithms.loss", ["ClippedPGLossFn", "MseValueLossFn", "NLLLossFn", "SequencePackingLossWrapper", "prepare_loss_input"]),
    ("algorithms.loss_functions", ["ClippedPGLossFn", "ClippedPGLossConfig", "MseValueLossFn"]),
    ("algorithms.grpo", ["AdvEstimatorConfig", "RewardShapingConfig", "RewardScalingConfig", "scale_rewards"]),
    ("data.packing", ["get_packer", "PackingAlgorithm", "PackingMetrics", "SequencePacker", "ConcatenativePacker",
                      "FirstFitDecreasingPacker", "FirstFitShufflePacker", "ModifiedFirstFitDecreasingPacker"]),
    ("data.datasets", ["AllTaskProcessedDataset", "load_response_dataset", "load_eval_dataset", "extract_necessary_env_names"]),
    ("data.multimodal_utils", ["PackedTensor"]),
    ("data", ["DataConfig", "ResponseDatasetConfig", "EvalDataConfigType"]),
    ("models.interfaces", ["PolicyInterface", "GenerationInterface", "ValueInterface"]),
    ("distributed.worker_groups", ["RayWorkerGroup"]),
    ("models.policy", ["PolicyConfig", "TokenizerConfig", "SequencePackingConfig", "DynamicBatchingConfig"]),
    ("models.value", ["ValueConfig"]),
    ("utils.logger", ["WandbLogger", "TensorboardLogger", "MLflowLogger", "SwanlabLogger", "RayGpuMonitorLogger"]),
    ("weight_sync", ["WeightSynchronizer", "create_weight_synchronizer"]),
    ("environments.utils", ["ENV_REGISTRY"]),
    ("data.processors", ["PROCESSOR_REGISTRY"]),
])  # fmt: skip
def test_names_that_users_import_from_a_package(module, names):
    found = load(module)
    assert [name for name in names if not hasattr(found, name)] == []


@pytest.mark.parametrize("module", sorted(GUIDES))
def test_names_that_the_guides_print_are_where_they_print_them(module):
    found = importlib.import_module(f"nemo_rl_cpp.{module}")
    assert [name for name in GUIDES[module] if not hasattr(found, name)] == []
    assert [name for name in GUIDES[module] if not hasattr(load(module), name)] == []


def run(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.split()


def test_importing_the_package_is_light():
    loaded = run("import sys, nemo_rl_cpp; print(*{name.split('.')[0] for name in sys.modules})")
    heavy = {
        "torch",
        "numpy",
        "ray",
        "vllm",
        "transformers",
        "datasets",
        "wandb",
        "mlflow",
        "swanlab",
        "trackio",
        "matplotlib",
    }
    assert heavy & set(loaded) == set()


@pytest.mark.slow
def test_no_public_module_imports_an_optional_package():
    code = (
        "import importlib, pkgutil, sys, nemo_rl_cpp\n"
        "for module in pkgutil.walk_packages(nemo_rl_cpp.__path__, 'nemo_rl_cpp.'):\n"
        "    name = module.name.rpartition('.')[2]\n"
        "    if not name.startswith(('_', 'lib')) and name != 'verifiers_chat':  # native modules, the core's library; verifiers loads the last\n"
        "        importlib.import_module(module.name)\n"
        "        print(module.name)\n"
        "print(*('loaded:' + name for name in sys.modules if '.' not in name))"
    )
    printed = run(code)
    loaded = {name.removeprefix("loaded:") for name in printed if name.startswith("loaded:")}
    imported = [name for name in printed if name.startswith("nemo_rl_cpp.")]
    assert len(imported) > 100 and "nemo_rl_cpp.algorithms.grpo" in imported
    optional = {
        "ray",
        "vllm",
        "transformers",
        "datasets",
        "wandb",
        "mlflow",
        "swanlab",
        "trackio",
        "reasoning_gym",
        "omegaconf",
    }
    assert optional & loaded == set()
