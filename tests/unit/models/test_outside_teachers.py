import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import tiny
import torch
from nemo_rl_cpp.algorithms.teachers import HfTeacher, OutsideTeacher, ServerTeacher
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.distributed.ragged_batch import offsets_of
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.rollouts.batches import TrainBatch
from nemo_rl_cpp.serving.model import EngineSizes
from served import serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tiny.one_thread()
    made = tmp_path_factory.mktemp("teacher")
    config = load_grpo_config("grpo_tiny.yaml").policy
    Policy(None, config, tiny_tokenizer(), seed=7, init_reference_model=False).save_checkpoint(made)
    return made


@pytest.fixture(scope="module")
def native(folder):
    config = load_grpo_config("grpo_tiny.yaml").policy
    return Policy(None, config, tiny_tokenizer(), seed=1, init_reference_model=False, teachers={"key": str(folder)})


def batch_of(lengths=(9, 5, 2, 7, 6, 4, 8, 3, 5, 9, 1)):
    random = torch.Generator().manual_seed(2)
    tokens = int(sum(lengths))
    mask = (torch.rand(tokens, generator=random) < 0.7).float()
    ids = torch.randint(4, 14, (tokens,), generator=random)
    samples = (torch.arange(len(lengths)) != 3).float()
    return TrainBatch(
        offsets_of(torch.tensor(lengths)), {"input_ids": ids, "token_mask": mask}, {"sample_mask": samples}
    )


def scored_by(score):
    batch = batch_of()
    OutsideTeacher(score).add_logprobs(batch, None)
    return batch.teacher_logprobs


def test_transformers_distillation_teacher_gives_the_logprobs_of_the_native_teacher(folder, native):
    expected = native.get_teacher_logprobs(batch_of(), str(folder))["teacher_logprobs"]
    ours = scored_by(HfTeacher(str(folder), "float32", 1.0, "cpu").score)
    assert expected.abs().sum() > 0
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_served_distillation_teacher_gives_the_logprobs_of_the_native_teacher(folder, native):
    expected = native.get_teacher_logprobs(batch_of(), str(folder))["teacher_logprobs"]
    with serving(folder, sizes=EngineSizes(max_model_len=32, kv_cache_gb=0.01)) as server:
        ours = scored_by(ServerTeacher(f"{server.url}/v1", "tiny").score)
        with pytest.raises(ValueError, match=r"status 404: .*does not exist: this server has"):
            ServerTeacher(f"{server.url}/v1", "other").score([[4, 5]])
    assert torch.equal(ours, expected)


def test_error_for_a_teacher_server_without_prompt_logprobs_names_the_server():
    class Silent(BaseHTTPRequestHandler):
        def do_POST(self):  # noqa: N802
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"index": 0, "text": ""}]}).encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(ValueError, match="sends no prompt_logprobs for the 2 token ids"):
            ServerTeacher(f"http://127.0.0.1:{server.server_port}/v1", "m").score([[4, 5]])
    finally:
        server.shutdown(), server.server_close()
    with pytest.raises(RuntimeError, match=r"^teacher.base_url: \S+ does not answer"):
        ServerTeacher(f"http://127.0.0.1:{server.server_port}/v1", "m").score([[4, 5]])
