from types import SimpleNamespace

import pytest
from nemo_rl_cpp import push_to_hub
from nemo_rl_cpp.models import hub_upload
from nemo_rl_cpp.models.hub_upload import UploadError


class Client:
    """A replacement for huggingface_hub.HfApi that records its calls. With `status` it raises an error with this HTTP
    status."""

    def __init__(self, status=None):
        self.calls, self.status = [], status

    def create_repo(self, repo_id, **options):
        self.calls.append(("create_repo", repo_id, options))
        if self.status is not None:
            error = RuntimeError("Client Error.\nRequest ID: 17")
            error.response = SimpleNamespace(status_code=self.status)
            raise error
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def upload_folder(self, **options):
        self.calls.append(("upload_folder", options))


@pytest.fixture
def run_folder(tmp_path):
    for step in (2, 10):
        weights = tmp_path / f"step_{step}" / "policy" / "weights"
        weights.mkdir(parents=True)
        (weights / "config.json").write_text("{}")
        (weights / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_newest_checkpoint_is_uploaded_to_a_private_hub_repository(run_folder):
    client = Client()
    assert push_to_hub(run_folder, "org/model", client=client) == "https://huggingface.co/org/model"
    (_, name, made), (_, sent) = client.calls
    assert name == "org/model" and made == {"private": True, "exist_ok": True, "repo_type": "model"}
    assert sent["folder_path"] == str(run_folder / "step_10" / "policy" / "weights") and sent["repo_id"] == "org/model"
    assert sent["commit_message"] == "step_10, by nemo_rl_cpp" and sent["allow_patterns"] == [
        "config.json",
        "model.safetensors",
    ]


def test_hub_repository_name_without_an_organisation_is_prefixed_with_the_user_name(run_folder):
    client = Client()
    address = push_to_hub(run_folder / "step_2", "model", private=False, message="first", client=client)
    assert address == "https://huggingface.co/me/model" and client.calls[1][1]["repo_id"] == "me/model"
    assert client.calls[0][2]["private"] is False and client.calls[1][1]["commit_message"] == "first"


def test_upload_rejected_by_the_hub_is_a_one_line_error(run_folder):
    with pytest.raises(UploadError, match="^the upload to org/model failed: .*RuntimeError: .*log in with") as caught:
        push_to_hub(run_folder, "org/model", client=Client(401))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a b", "a/b/c", "", "-a/b", "a/b.", "a--b", "a/..b", 3, None, "x" * 97])
def test_invalid_hub_repository_name_is_an_error_before_any_request(run_folder, name):
    client = Client()
    with pytest.raises(ValueError, match="repo_id is .*: give the name of a repository, organisation/name"):
        push_to_hub(run_folder, name, client=client)
    assert client.calls == []


def test_uploading_a_folder_without_a_model_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="which holds no model .config.json and .*: give a model folder, a checkpoint"):
        push_to_hub(tmp_path, "org/model", client=Client())
    with pytest.raises(ValueError, match="private = 'no': expected True or False"):
        push_to_hub(tmp_path, "org/model", private="no", client=Client())


def test_upload_without_a_hub_token_is_an_error_before_any_request(run_folder, monkeypatch):
    monkeypatch.setattr(hub_upload, "can_push", lambda: False)
    with pytest.raises(UploadError, match="nothing was uploaded, since this machine has no token of the hub"):
        push_to_hub(run_folder, "org/model")


def test_only_model_tokenizer_and_adapter_files_are_uploaded_to_the_hub(tmp_path):
    from huggingface_hub.utils import filter_repo_objects

    model = ["config.json", "model.safetensors", "merges.txt", "a[1].json", "README.md"]
    model += [f"adapter/{name}" for name in ("adapter_config.json", "adapter_model.safetensors", "base.json")]
    others = [
        "step_10/policy/optimizer/state.safetensors", "sub/token.json", "notes.txt", "merges.txt.bak", ".hidden.json",
        "[x]*.json/a1.json", "adapter/notes.txt", "adapter/sub/a.json",
    ]  # fmt: skip
    for name in model + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    client = Client()
    push_to_hub(tmp_path, "org/model", client=client)
    sent = client.calls[1][1]
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    went = filter_repo_objects(
        files, allow_patterns=sent["allow_patterns"], ignore_patterns=sent.get("ignore_patterns")
    )
    assert sorted(went) == sorted(model)


def test_upload_replaces_the_weights_and_the_adapter_of_an_earlier_upload(run_folder, monkeypatch):
    from huggingface_hub import HfApi

    weights = ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    there = [*weights, "adapter/base.json"]
    client, api = Client(), HfApi()
    push_to_hub(run_folder, "org/model", client=client)
    monkeypatch.setattr(HfApi, "list_repo_files", lambda self, **options: [*there, "config.json", "mine.safetensors"])
    patterns = client.calls[1][1]["delete_patterns"]
    deleted = api._prepare_folder_deletions("org/model", "model", None, "", patterns)
    assert sorted(each.path_in_repo for each in deleted) == sorted(there)
