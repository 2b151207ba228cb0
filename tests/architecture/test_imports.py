"""Nothing imports `compat`, and no definition of the package is there for tests alone."""

from architecture.python_imports import ROOT, imports
from tools import reached

PACKAGE = ROOT / "python" / "nemo_rl_cpp"
COMPAT = "nemo_rl_cpp.compat"


def test_only_modules_of_the_compat_package_import_the_compat_package():
    house = {name: found for name, found in imports(PACKAGE).items() if name.split(".")[0] != "compat"}
    assert [name for name, found in house.items() if any(other.split(".")[0] == "compat" for other in found)] == []
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "compat"]
    assert len(files) > 150 and [path for path in files if COMPAT in path.read_text()] == []


def test_unused_definition_check_finds_functions_that_only_unused_code_calls(tmp_path, monkeypatch):
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


def test_every_definition_in_the_package_is_used_outside_the_tests():
    lost = [f"{item.path.name}:{item.name}" for item in reached.reached(ROOT) if not item.reached]
    assert not lost, "neither a user nor a port needs it: delete it, or document it where users look"
