"""How the Python modules hang together: nothing imports `compat`, and no circles but the known ones."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "nemo_rl_cpp"
COMPAT = "nemo_rl_cpp.compat"
# circles through imports inside functions; those of `config` are within one folder
KNOWN: list[set[str]] = []


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def circles():
    return tool("import_circles")


def test_no_module_outside_compat_imports_compat(circles):
    inside = {m: targets for m, targets in circles.graph(ROOT, lazy=True).items() if not m.startswith(COMPAT)}
    assert {m: t for m, targets in inside.items() for t in targets if t.startswith(COMPAT)} == {}
    house = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "compat"]
    assert len(house) > 150 and [path for path in house if COMPAT in path.read_text()] == []


def test_module_level_imports_have_no_cycle(circles):
    assert circles.circles(circles.graph(ROOT, lazy=False)) == []


def test_function_level_imports_add_no_unknown_cycle(circles):
    found = [set(group) for group in circles.circles(circles.graph(ROOT, lazy=True))]
    new = [g for g in found if g not in KNOWN and not all(m.startswith("nemo_rl_cpp.config.") for m in g)]
    assert new == []


def test_import_cycles_through_relative_and_function_level_imports_are_found(circles, tmp_path):
    package = tmp_path / "python" / "nemo_rl_cpp"
    (package / "a").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "a" / "__init__.py").write_text("")
    (package / "a" / "b.py").write_text("from ..c import x\n")
    (package / "c.py").write_text("def f():\n    from nemo_rl_cpp.a import b\n    return b\n")
    (package / "d.py").write_text("import typing\nif typing.TYPE_CHECKING:\n    import nemo_rl_cpp.e\n")
    (package / "e.py").write_text("import nemo_rl_cpp.d\n")
    assert circles.circles(circles.graph(tmp_path, lazy=False)) == []
    assert circles.circles(circles.graph(tmp_path, lazy=True)) == [["nemo_rl_cpp.a.b", "nemo_rl_cpp.c"]]


def test_unused_definitions_are_found_by_following_names(tmp_path, monkeypatch):
    reached = tool("reached")
    package = tmp_path / "python" / "nemo_rl_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('_EXPORTS = {"Public": "a"}\n')
    (package / "a.py").write_text(
        "from nemo_rl_cpp.b import used, unused\n__all__ = ['unused']\n"
        "class Public:\n    def __init__(self):\n        self.called()\n    def called(self):\n        return used()\n"
        "    def never(self):\n        pass\n"
    )
    (package / "compat").mkdir()
    (package / "compat" / "c.py").write_text("from nemo_rl_cpp.b import ported\n")
    (package / "b.py").write_text(
        "def ported():\n    pass\ndef used():\n    return Public().called()\ndef unused():\n    return helper()\ndef helper():\n    pass\n"
    )
    monkeypatch.setattr(reached, "STARTS", ())
    lost = {item.name for item in reached.reached(tmp_path) if not item.reached}
    assert lost == {"_EXPORTS", "never", "unused", "helper"}


def test_no_definition_is_used_by_tests_only():
    lost = [f"{item.path.name}:{item.name}" for item in tool("reached").reached(ROOT) if not item.reached]
    assert not lost, "neither a user nor a port needs it: delete it, or document it where users look"
