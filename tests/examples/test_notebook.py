"""The notebook, executed by a kernel as Jupyter does."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]


def outputs(cell: Any) -> str:
    """All text that a cell printed or shows."""
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)


@pytest.mark.slow
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook: Any = nbformat.read(ROOT / "examples/quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "the file holds no outputs"
    client = NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}})
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        kernel: Any = client.km
        children = psutil.Process(kernel.provisioner.process.pid).children(recursive=True)
        assert not [child for child in children if "EnvGroup" in child.name()], "no worker is left"
    train, shown, curve, successes, tasks, chunk, mistake = [
        cell for cell in notebook.cells if cell.cell_type == "code"
    ][1:]
    printed = outputs(train)
    assert "--> after 0 steps: 0% of 64 episodes" in printed
    rows = [int(row[1]) for row in re.finditer(r"^ +(\d+) +[\d.]+% .* ms ", printed, re.MULTILINE)]
    assert rows == list(range(1, 16)), f"no live display, a row a step: {printed}"
    assert "after against before: the same 64 episodes" in printed
    assert "<table>" in shown.outputs[0].data["text/html"]
    assert curve.outputs[0].data["image/png"]
    assert len(eval(outputs(successes))) == 15
    assert "move the point to the goal" in outputs(tasks)
    assert outputs(chunk).count("[") == 5, "four actions"
    assert "Did you mean 'runner.max_steps'" in outputs(mistake)
    assert len(list((tmp_path / "results/dummy_grpo").iterdir())) == 2, "a training and an evaluation"


@pytest.mark.slow
def test_the_stop_button_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    manager: Any
    client: Any
    manager, client = start_new_kernel(cwd=str(tmp_path))
    try:
        overrides = ["experiment=dummy_grpo", "runner.max_steps=2000", "runner.save_interval=1"]
        client.execute(f"import embodied_rl as er; er.train(*{overrides})")
        printed, error, interrupted = "", "", False
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            message = client.get_iopub_msg(timeout=60)
            kind, content = message["msg_type"], message["content"]
            if kind in ("stream", "display_data"):
                printed += content.get("text") or content["data"]["text/plain"]
            elif kind == "error":
                error = content["ename"]
            elif kind == "status" and content["execution_state"] == "idle" and interrupted:
                break
            if not interrupted and "trend" in printed and printed.count("\n") > 8:
                manager.interrupt_kernel()
                interrupted = True
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert error == "KeyboardInterrupt", printed
    assert re.search(r"interrupted: checkpoint of step \d+ is complete", printed), printed
    assert list(tmp_path.glob("results/dummy_grpo/*/checkpoints/global_step_*/state.json"))
