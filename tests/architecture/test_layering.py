"""The include and import rules of docs/architecture.md, read from its table."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC, PACKAGE = ROOT / "csrc", ROOT / "python" / "nemo_rl_cpp"
SOURCES = sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})


def allowed_includes() -> dict[str, set[str]]:
    table = {}
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        if match := re.match(r"\| \d \| `(\w+)` \| .* \| ([\w, ]*)\|$", line):
            table[match[1]] = {name.strip() for name in match[2].split(",") if name.strip()}
    return table


def includes(path: Path) -> list[str]:
    return re.findall(r'#include ["<]([^">]+)[">]', path.read_text())


def test_layer_table_of_the_architecture_page_lists_every_csrc_folder():
    assert {p.name for p in CSRC.iterdir() if p.is_dir() and any(p.rglob("*.*"))} <= set(allowed_includes())


@pytest.mark.parametrize("folder", sorted(allowed_includes()))
def test_csrc_files_include_only_headers_of_lower_layers(folder):
    table = allowed_includes()
    allowed = set(table) if "all" in table[folder] else table[folder] | {folder}
    for path in SOURCES:
        if path.relative_to(CSRC).parts[0] == folder:
            for include in includes(path):
                target = include.split("/")[0]
                assert target not in table or target in allowed, f"{path.relative_to(ROOT)} includes {include}"


def test_csrc_folders_that_must_not_depend_on_torch_include_no_torch_header():
    for path in SOURCES:
        if path.relative_to(CSRC).parts[0] in {"common", "kernels", "batching", "config"}:
            for include in includes(path):
                assert not re.match(r"(ATen|c10|torch|pybind11)/", include), (
                    f"{path.relative_to(ROOT)} includes {include}"
                )


def test_only_files_in_csrc_bindings_include_pybind11():
    for path in SOURCES:
        if path.relative_to(CSRC).parts[0] != "bindings":
            assert not any("pybind" in i for i in includes(path)), path.relative_to(ROOT)


def test_no_source_file_includes_an_umbrella_header_of_torch():
    for path in SOURCES:
        assert not {"torch/torch.h", "torch/extension.h", "ATen/ATen.h"} & set(includes(path)), path.relative_to(ROOT)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


def test_config_package_never_imports_torch():
    for path in (PACKAGE / "config").rglob("*.py"):
        assert not {i for i in imports(path) if i.split(".")[0] == "torch"}, path.relative_to(ROOT)


def test_reference_implementations_do_not_import_nemo_rl_cpp():
    for path in (ROOT / "tests" / "reference").rglob("*.py"):
        assert not {i for i in imports(path) if i.startswith("nemo_rl_cpp")}, path.relative_to(ROOT)
