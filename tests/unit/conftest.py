"""Fixtures for unit tests: tokenizers, which need no network, and a clock."""

import time
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def smollm2_tokenizer_folder(tmp_path_factory):
    """Convert SmolLM2's tokenizer from its package into a folder without weights, in about a second."""
    from gguf import GGUFReader
    from nemo_rl_cpp.hub.gguf_tokenizer import write_tokenizer
    from nemo_rl_cpp.hub.sources import smollm2_gguf

    folder = tmp_path_factory.mktemp("smollm2-tokenizer")
    write_tokenizer(GGUFReader(smollm2_gguf()), folder)
    return folder


@pytest.fixture(scope="session")
def smollm2(smollm2_tokenizer_folder):
    from nemo_rl_cpp.data.tokenizer import Tokenizer

    return Tokenizer.from_pretrained(smollm2_tokenizer_folder)


@pytest.fixture(scope="session")
def hf_smollm2(smollm2_tokenizer_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_tokenizer_folder)


@pytest.fixture
def tiny():
    from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture
def clock(monkeypatch):
    """Replace Python's monotonic clocks with a clock that advances only when a test increases its attribute `now`."""
    clock = SimpleNamespace(now=1000.0)
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: clock.now)
    return clock
