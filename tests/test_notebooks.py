"""Every notebook runs from its first cell to its last."""

import re
from pathlib import Path

import compilation
import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))

PROMISED = {  # notebook -> a pattern for each promised piece of what its cells print
    "01_quickstart": [
        r"(?m) In\[\d+\]:\d+ ",  # lines of cells by the numbers of the cells
        r"Predicted +per step",  # the plan, its tables in the text where print puts them
        r"peak memory +[\d.]+ [KM]iB +[\d.]+ [KM]iB\n",  # no "differs" behind the figures
        r"step  40 +8 devices (\d\.\d{3})\d* +one device \1",
        r"FSDP +[\d,]+ us per step",
    ],
    "02_reading_a_plan": [
        r"train_step on 8 devices \(data=4, model=2\), planned for v5e:4x2",
        r"Memory at the peak, In\[\d+\]:\d+",
        r"Step if it lies as[^$]*Dim 0 has 250 elements[^$]*248 and 252",
        r"What if fixed=",
        r"on 4 devices \(data=4\)",
        r"Arguments that lie otherwise",
    ],
    "03_planning_for_a_pod_you_dont_have": [
        r"1\.14 billion parameters",
        r"no sharding fits in 16\.0 GiB per device",
        r"(?s)train_step on 16 devices \(data=4, model=4\), planned for v5e:4x4.*remat='auto'",
        r"\d ms per step, \d\.\d GiB of 8\.0 GiB per device",
        r"\{'data': [^}]*\} +\d+\.\d ms per step",
        r"planned for v5e:",
    ],
    "04_how_it_works": [
        r"split i     operands \[1, 0\]  result None  partial sums True",
        r"optimal: (\d+\.\d+) us, FlexFlow's search \1 us",
        r"all_reduces predicted 1, in XLA's program 1",
        r"up +float32\[64, 4096\] +P\(None, \"d\"\)",
    ],
    "05_your_own_rule": [
        r"no sharding rule for primitive 'row_energy' \(In\[\d+\]:\d+\)",
        r"gathers: \['all_gather'\]",
        r"x lies as P\('data',\): collectives \[\]",
        r"x lies as P\(None, 'data'\): collectives \[\('all_reduce', 256\)\]",
        r"x lies as P\('data',\), optimal",
    ],
}


def execute(notebook: nbformat.NotebookNode) -> str:
    """Run a notebook in a fresh kernel; everything it printed."""
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


SLOW = {"03_planning_for_a_pod_you_dont_have"}  # plans a real model several times
SMALLER = {"01_quickstart": ("BATCH = 128, 64, 8, 2, 32, 32\n", "BATCH = 128, 64, 8, 1, 16, 16\n")}
CASES = [pytest.param(path, marks=pytest.mark.slow if path.stem in SLOW else (), id=path.stem) for path in NOTEBOOKS]


@pytest.mark.parametrize("path", CASES)
def test_runs(path, monkeypatch):
    """Its model is smaller than that of who reads it, where it says how large it is."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    if path.stem not in SLOW:  # which compile for TPUs, too
        monkeypatch.setenv("XLA_FLAGS", compilation.CPU_ONLY)
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without their outputs"
    for cell in notebook.cells:
        cell.source = cell.source.replace(*SMALLER.get(path.stem, ("", "")))
    printed = execute(notebook)
    missing = [pattern for pattern in PROMISED[path.stem] if not re.search(pattern, printed)]
    assert not missing, f"{missing} not in what {path.name} prints:\n{printed}"


def test_a_failing_cell_fails():
    cell = nbformat.v4.new_code_cell("assert False, 'planted'")
    with pytest.raises(CellExecutionError, match="planted"):
        execute(nbformat.v4.new_notebook(cells=[cell]))
