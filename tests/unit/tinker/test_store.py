from pathlib import Path

import pytest
from nemo_rl_cpp.commands import serve
from nemo_rl_cpp.files import durable
from nemo_rl_cpp.files.folder_lock import FolderInUseError
from nemo_rl_cpp.tinker.adapters import Shape
from nemo_rl_cpp.tinker.store import Facts, Place, Store

PLACE = Place("s:train:0", "weights", "x")


class Killed(BaseException):
    """Raised to simulate a process that is killed, without any cleanup."""


def saved(store: Store) -> str | None:
    return (store.folder(PLACE) / "text").read_text() if store.places() == [PLACE] else None


def save(store: Store, text: str) -> None:
    store.save(PLACE, Facts("base", Shape(2)), lambda folder: (folder / "text").write_text(text), overwrite=True)


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_killed_save_leaves_either_the_old_or_the_new_tinker_checkpoint(tmp_path, monkeypatch, renames):
    store = Store(tmp_path)
    save(store, "old")
    done = []

    def rename(source: Path, target: Path) -> None:
        if len(done) == renames:
            raise Killed
        done.append(source.rename(target))

    with monkeypatch.context() as patch:
        patch.setattr(durable, "rename", rename)
        patch.setattr("nemo_rl_cpp.tinker.store.shutil.rmtree", lambda *args, **options: None)
        if renames < 2:
            with pytest.raises(Killed):
                save(store, "new")
        else:
            save(store, "new")
    store.close()
    assert saved(Store(tmp_path)) == ("new" if renames == 2 else "old")
    assert not list(tmp_path.glob("*/*/.*"))


def test_killed_deletion_leaves_no_partial_tinker_checkpoint(tmp_path, monkeypatch):
    store = Store(tmp_path)
    save(store, "old")
    with monkeypatch.context() as patch:
        patch.setattr("nemo_rl_cpp.tinker.store.shutil.rmtree", lambda *args, **options: None)
        store.delete(PLACE)
    store.close()
    assert Store(tmp_path).places() == [] and not list(tmp_path.glob("*/*/.*"))


def test_tinker_checkpoint_folder_in_use_by_another_process_is_an_error(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(FolderInUseError, match="--tinker"):
        Store(tmp_path, "--tinker")
    store.close()
    Store(tmp_path).close()


@pytest.mark.parametrize("option", ["--max-queue", "--request-timeout", "--seed"])
def test_openai_route_options_of_the_serve_command_are_errors_in_tinker_mode(option, capsys):
    with pytest.raises(SystemExit):
        serve.main(["--model", "tiny-random", "--tinker", "folder", option, "5"])
    assert f"{option} does not apply to --tinker" in capsys.readouterr().err
