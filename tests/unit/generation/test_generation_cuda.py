"""A saved model that generates on a GPU: the commands, `load` and the server."""

import nemo_rl_cpp
import pytest
import served
from nemo_rl_cpp.generate import TextGenerator
from nemo_rl_cpp.serving.model import EngineSizes, Limits, load_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", [None, "q4_0"])
def test_generate_load_and_serve_compute_the_same_tokens_on_a_gpu(kind, tmp_path):
    folder = served.make_folder(tmp_path / "model")
    options = dict(precision="float32", quantization=kind, device="cuda")
    text = TextGenerator(folder, **options).generate("hello", greedy=True, max_new_tokens=24)
    loaded = nemo_rl_cpp.load(folder, **options)
    assert text.text.startswith(loaded.generate("hello", max_new_tokens=24)[0]) and len(text.token_ids) > 4
    ours = load_model(str(folder), served_name=None, sizes=EngineSizes(), limits=Limits(), **options)
    ids = loaded.tokenizer.encode("hello") + text.token_ids
    scored, likeliest = ours.score_prompt(ids, 3)
    ours.engine.close(patience=0)
    on_cpu = TextGenerator(folder, **options | {"device": "cpu"}).generate("hello", greedy=True, max_new_tokens=24)
    assert on_cpu.token_ids == text.token_ids
    for position in range(len(ids) - len(text.token_ids), len(ids)):
        token, logprob = likeliest[position][0]
        assert token == ids[position] and logprob == pytest.approx(scored[position], abs=1e-5)
