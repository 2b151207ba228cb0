import asyncio
import json
import urllib.request

from nemo_gym.cli import RunHelper


class RolloutCollectionHelper:
    def run_examples(self, examples, head_server_config):
        assert head_server_config.port == RunHelper.config["head_server"]["port"]
        return [self._run(row) for row in examples]

    async def _run(self, row):
        if row["agent_ref"]["name"] == "broken_agent":
            raise ConnectionError("the agent does not answer")
        return row, await asyncio.to_thread(self._play, row)

    def _play(self, row):
        config, params = RunHelper.config, row["responses_create_params"]
        assert config["policy_model"]["responses_api_models"]["vllm_model"]["return_token_id_information"] is False
        assert "temperature" not in params
        body = json.loads(params["metadata"]["extra_body"]) | {"model": config["policy_model_name"], "max_tokens": 1}
        body |= {"prompt": params["input"], "ignore_eos": True}
        request = urllib.request.Request(
            config["policy_base_url"] + "/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {config['policy_api_key']}"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = json.load(answer)["choices"][0]["text"]
        right = float(text == row["verifier_metadata"]["digit"])
        return {
            "reward": right, "is_seven": text == "7", "mask_sample": text == "9", "_internal": 1,
            "response": {"output": []},
        }  # fmt: skip
