"""README's tree equals the disk."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tree_in_the_readme_is_current():
    spec = importlib.util.spec_from_file_location("readme_tree", ROOT / "tests" / "tools" / "readme_tree.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme = (ROOT / "README.md").read_text()
    assert module.replaced(readme) == readme, "run: python tests/tools/readme_tree.py --write"
