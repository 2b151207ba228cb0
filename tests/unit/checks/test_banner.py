import nemo_rl_cpp.checks.banner as banner
import pytest
from nemo_rl_cpp.checks.banner import banner_lines, rows_of
from nemo_rl_cpp.config import load_grpo_config, load_sft_config
from nemo_rl_cpp.models.memory import certain_bytes


def lines_of(config):
    title, *rows = banner_lines(config)
    return title, {row[2:12].strip(): row[12:] for row in rows}


def test_start_banner_of_a_run_lists_model_steps_device_memory_and_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(banner, "cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    logs, saved = tmp_path / "logs", tmp_path / "results"
    (logs / "exp_006").mkdir(parents=True)
    config = load_grpo_config(
        "configs/grpo_arithmetic_smollm2.yaml", [f"logger.log_dir={logs}", f"checkpointing.checkpoint_dir={saved}"]
    )
    title, rows = lines_of(config)
    assert title == "GRPO smollm2-135m-instruct"
    assert list(rows) == ["model", "steps", "device", "memory", "folder", "report", "data"]
    assert rows["model"] == "smollm2-135m-instruct, 135 million parameters, bfloat16"
    assert rows["steps"] == "20 or 1000 epochs, of 16 prompts with 8 answers each"
    assert rows["device"] == "cpu, 3 threads on 4 cores"
    assert "at the peak, in generation; fits into this machine's" in rows["memory"]
    assert rows["folder"] == f"{saved}, starts from scratch"
    assert rows["report"] == f"file://{logs}/exp_007/report.html"
    # 50 * 51 / 2 unordered pairs of 1 to 50, and those off the diagonal twice, less what is held out
    assert rows["data"].startswith("arithmetic, ") and rows["data"].endswith("; validation: arithmetic, 256 rows")


def test_start_banner_of_supervised_fine_tuning_counts_rows():
    assert lines_of(load_sft_config("configs/sft_arithmetic_smollm2.yaml"))[1]["steps"].endswith("of 32 rows")


def test_start_banner_of_a_lora_run_has_a_lora_line_and_a_smaller_memory_estimate():
    full, lora = (
        load_grpo_config(f"configs/grpo_arithmetic_smollm2{name}.yaml", ["policy.generation.packed_weights=off"])
        for name in ("", "_lora")
    )
    assert lines_of(lora)[1]["lora"] == "dim 8, 210 of 210 matrices: 2.44 million of 135 million parameters trained"
    assert "lora" not in lines_of(full)[1]
    needs = [certain_bytes(config) for config in (full, lora)]
    assert needs[0] == pytest.approx(134_515_008 * 18, rel=1e-3)
    # weights, and once more those of the layers; 10,176 rows of A and columns of B a layer
    assert needs[1] == pytest.approx(134_515_008 * 2 + 106_168_320 * 2 + 30 * 10_176 * 8 * 18, rel=1e-3)
    merge = "policy.dtensor_cfg.lora_cfg.merge=false"
    apart = load_grpo_config(
        "configs/grpo_arithmetic_smollm2_lora.yaml", ["policy.generation.packed_weights=off", f"++{merge}"]
    )
    assert "210 matrices, apart from the weights:" in lines_of(apart)[1]["lora"]
    assert certain_bytes(apart) == pytest.approx(134_515_008 * 2 + 30 * 10_176 * 8 * 21, rel=1e-3)


def test_lora_line_of_the_start_banner_counts_the_adapted_matrices_of_all_layers():
    recurrent = {
        "model_type": "qwen3_5_text", "num_hidden_layers": 3, "full_attention_interval": 2, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    overrides = [f"++policy.hf_config_overrides.{key}={value}" for key, value in recurrent.items()]
    config = load_grpo_config("configs/grpo_tiny.yaml", [*overrides, "policy.dtensor_cfg.lora_cfg.enabled=true"])
    assert lines_of(config)[1]["lora"].startswith("dim 8, 23 of 23 matrices: ")  # 8 + 7 + 8
    some = "policy.dtensor_cfg.lora_cfg.target_modules=[q_proj,in_proj_a]"
    config = load_grpo_config("configs/grpo_tiny.yaml", [
        *overrides, "policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.match_all_linear=false",
        some,
    ])  # fmt: skip
    assert lines_of(config)[1]["lora"].startswith("dim 8, 3 of 23 matrices: ")


def test_lora_line_of_the_start_banner_says_whether_moe_experts_are_adapted():
    mixture = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    overrides = [f"++policy.hf_config_overrides.{key}={value}" for key, value in mixture.items()]
    overrides.append("policy.dtensor_cfg.lora_cfg.enabled=true")

    def line(*more):
        return lines_of(load_grpo_config("configs/grpo_tiny.yaml", [*overrides, *more]))[1]["lora"]

    assert line().startswith("dim 8, 8 of 8 matrices: ") and line().endswith(
        "; the experts are frozen (match_all_linear=false and target_modules=['*proj*','*.experts'] would adapt them)"
    )
    some, lora = "policy.dtensor_cfg.lora_cfg.match_all_linear=false", "policy.dtensor_cfg.lora_cfg.target_modules"
    assert line(some, f"{lora}=[q_proj]").endswith(
        "; the experts are frozen ('*.experts' in target_modules would adapt them)"
    )
    adapted = line(some, f"{lora}=['*proj*','*.experts']")
    assert adapted.startswith("dim 8, 8 of 8 matrices and the experts of 2 layers: ") and "frozen" not in adapted


def test_start_banner_reports_insufficient_memory_and_disabled_checkpointing(monkeypatch):
    monkeypatch.setattr("nemo_rl_cpp.models.memory.machine_memory", lambda: 1e9)
    config = load_grpo_config("configs/grpo_arithmetic_smollm2.yaml", [
        "checkpointing.enabled=false", "logger.report=false", "cluster.cpus_per_worker=1",
        "logger.log_dir=/nowhere/logs",
    ])  # fmt: skip
    _, rows = lines_of(config)
    assert "does not fit into this machine's 1 GB" in rows["memory"]
    assert rows["folder"] == "none: checkpointing.enabled is false, nothing is saved"
    assert "report" not in rows and rows["logs"] == "/nowhere/logs/exp_001"
    assert rows["device"].startswith("cpu, 1 thread")


def test_start_banner_shows_row_counts_only_for_existing_jsonl_files(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "1"}\n\n{"input": "2"}\n{"input": "3"}')
    assert rows_of({"dataset_name": "ResponseDataset", "data_path": str(file)}) == 3
    assert rows_of({"dataset_name": "ResponseDataset", "data_path": str(tmp_path / "missing.jsonl")}) is None
    assert rows_of({"dataset_name": "ResponseDataset", "data_path": "openai/gsm8k"}) is None
    assert rows_of({"dataset_name": "arithmetic", "max_number": 0}) is None  # a mistake, which the checks name
