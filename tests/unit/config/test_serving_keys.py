import importlib.util

import pytest
from nemo_rl_cpp.config import ConfigError, load_grpo_config

EXPOSE = "policy.generation.expose_http_server=true"
AGENT = ["++env.agent={function:my_agent.play}", "data.default.env_name=agent", "++data.default.processor=agent_data_processor"]  # fmt: skip


def mistakes(*overrides):
    with pytest.raises(ConfigError) as error:
        load_grpo_config("grpo_tiny.yaml", list(overrides))
    return str(error.value)


def test_agent_function_requires_the_http_server_and_forbids_max_rollout_turns():
    load_grpo_config("grpo_tiny.yaml", [*AGENT, EXPOSE])
    assert "expose_http_server is false, but the agent of env.agent asks" in mistakes(*AGENT)
    assert "max_rollout_turns is 3, but the agent" in mistakes(*AGENT, EXPOSE, "grpo.max_rollout_turns=3")


def test_http_server_in_a_run_requires_its_api_key_variable_and_python_packages(monkeypatch):
    variable = "policy.generation.http_server.api_key_variable=SERVE_KEY_OF_A_TEST"
    assert "is SERVE_KEY_OF_A_TEST, but that variable is not set" in mistakes(EXPOSE, variable)
    monkeypatch.setenv("SERVE_KEY_OF_A_TEST", "x")
    load_grpo_config("grpo_tiny.yaml", [EXPOSE, variable])
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else find(name, *rest)
    )
    assert "needs the package uvicorn" in mistakes(EXPOSE)


APART = ["policy.generation.colocated.enabled=false", "cluster.executor=processes"]


def workers(total, engines):
    return [*APART, f"cluster.gpus_per_node={total}", f"policy.generation.colocated.resources.gpus_per_node={engines}"]


def test_http_server_in_a_run_requires_a_single_generation_engine():
    load_grpo_config("grpo_tiny.yaml", [EXPOSE, *workers(2, 1)])
    assert "is true, but one engine can be served and 2 generate" in mistakes(EXPOSE, *workers(3, 2))
    assert "cluster.executor to in_process" in mistakes(EXPOSE, "cluster.executor=processes", "cluster.gpus_per_node=2")


def test_megatron_expose_http_server_requires_the_key_of_the_same_name_in_policy_generation():
    megatron = "++policy.generation.mcore_generation_config.expose_http_server=true"
    load_grpo_config("grpo_tiny.yaml", [megatron])  # NeMo RL reads it with its engine alone
    load_grpo_config("grpo_tiny.yaml", [megatron, "policy.generation.backend=megatron", EXPOSE])
    said = mistakes(megatron, "policy.generation.backend=megatron")
    assert "mcore_generation_config.expose_http_server is true, but policy.generation.expose_http_server" in said
