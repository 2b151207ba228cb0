import pytest
from huggingface_hub import ModelCard
from nemo_rl_cpp import __version__
from nemo_rl_cpp.config import load_grpo_config, load_ppo_config
from nemo_rl_cpp.config.loader import load_sft_config
from nemo_rl_cpp.models.hub_upload import card_text, write_card


def test_model_card_lists_base_model_algorithm_steps_and_data_of_the_run():
    card = ModelCard(card_text(load_grpo_config("grpo_arithmetic_smollm2.yaml"), 20))
    assert card.data.to_dict() == {
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "grpo", "nemo_rl_cpp"],
    }  # fmt: skip
    for line in (
        "# HuggingFaceTB/SmolLM2-135M-Instruct, trained with GRPO",
        f"by reinforcement learning with nemo_rl_cpp {__version__}: 20 steps on arithmetic.",
        "AutoModelForCausalLM.from_pretrained(",
        "nemo_rl_cpp.load(",
    ):
        assert line in card.text, line


def test_model_card_of_supervised_fine_tuning_does_not_name_reinforcement_learning():
    card = ModelCard(card_text(load_sft_config("sft_arithmetic_smollm2.yaml"), 20))
    assert card.data.tags == ["sft", "nemo_rl_cpp"] and "was trained by supervised fine-tuning with" in card.text


def test_model_card_code_for_an_adapter_on_a_quantised_base_loads_base_and_adapter():
    keys = ["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.quantization=q4_0"]
    text = card_text(load_grpo_config("grpo_arithmetic_smollm2.yaml", keys), 20)
    assert 'model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")\n' in text
    assert 'model = PeftModel.from_pretrained(model, "FOLDER OR REPOSITORY", subfolder="adapter")\n' in text
    assert "\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n" in text


def test_model_card_metadata_lists_only_base_models_and_data_sets_from_the_hub():
    rows = "{dataset_name: ResponseDataset, data_path: openai/gsm8k, input_key: question, output_key: answer}"
    card = ModelCard(card_text(load_ppo_config("ppo_math_1B.yaml", [f"data.train={rows}"]), 20))
    assert card.data.base_model == "Qwen/Qwen2.5-1.5B" and card.data.datasets == ["openai/gsm8k"]
    assert "# Qwen/Qwen2.5-1.5B, trained with PPO" in card.text


def test_model_card_names_local_folders_without_their_full_path(tmp_path):
    (tmp_path / "base").mkdir()
    given = [f"policy.model_name={tmp_path}/base", f"data.train.data_path={tmp_path}/rows.jsonl"]
    text = card_text(load_grpo_config("grpo_jsonl.yaml", [*given, "env.reward_functions.functions=[math.pi]"]), 20)
    assert "20 steps on ResponseDataset, rows.jsonl." in text and "# base, trained with GRPO" in text
    assert str(tmp_path) not in text
    assert "base_model" not in ModelCard(text).data.to_dict()


@pytest.mark.parametrize("there", [None, "ours", "# My model\n"])
def test_user_written_model_card_is_not_overwritten(tmp_path, there):
    config = load_grpo_config("grpo_tiny.yaml")
    if there is not None:
        (tmp_path / "README.md").write_text(card_text(config, 1) if there == "ours" else there)
    write_card(tmp_path, config, 20)
    text = (tmp_path / "README.md").read_text()
    assert text == (there if there == "# My model\n" else card_text(config, 20))
