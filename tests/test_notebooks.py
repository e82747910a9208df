"""Notebooks run top to bottom on a CPU, install nothing outside Colab, and define nothing."""

import ast
import re
import sys
from pathlib import Path

import nbformat
import pytest
from made_runs import make_multirun
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Overrides that make a notebook short, and a file that it leaves in its folder.
SHORT = {
    "quickstart": (
        "steps=2 warm.steps=20 warm.gate=0 eval.episodes=8 sched.group=4 sched.batch=2 "
        "sched.in_flight=4 sched.window=2 rollout.slots=16",
        "summary.json",
    ),
    "scheduling": (
        "workloads=[lognormal] policies=[fifo,greedy,tuned] in_flight=8 batch=4 updates=10 "
        "horizon=10",
        "window.json",
    ),
    "results": ("", "comparison.png"),  # of runs that nobody ran
    "prefix_tree": ("workloads=[micro] model=micro steps=1 contexts=[64]", "bench/rows.json"),
}
SHELL = re.compile(r"^(\s*)[!%].*")


def plain(source: str) -> str:
    """A cell without its shell and magic lines."""
    lines = source.splitlines()
    return "\n".join(SHELL.sub(r"\1pass", line) for line in lines)


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jupyter's own event loops
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    notebook = nbformat.read(path, as_version=4)
    (parameters,) = [c for c in code(notebook) if "parameters" in c.metadata.get("tags", [])]
    overrides, left = SHORT[path.stem]
    if path.stem == "results":
        make_multirun(tmp_path / "run")
    parameters.source = f'OVERRIDES = "{overrides}"\nRUN = r"{tmp_path / "run"}"'
    client = NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()
    assert (tmp_path / "run" / left).is_file()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_installs_only_in_colab(path: Path) -> None:
    first, *others = code(nbformat.read(path, as_version=4))
    install = [line for line in first.source.splitlines() if "pip install" in line]
    assert install
    assert all(line.startswith("    ") for line in install), "an install outside the condition"
    assert 'if "google.colab" in sys.modules:' in first.source
    assert "google.colab" not in sys.modules
    assert not any("pip install" in cell.source for cell in others)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_defines_nothing_and_is_stored_without_outputs(path: Path) -> None:
    for cell in code(nbformat.read(path, as_version=4)):
        assert not cell.outputs
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        assert not [n for n in ast.walk(ast.parse(plain(cell.source))) if isinstance(n, kinds)]
