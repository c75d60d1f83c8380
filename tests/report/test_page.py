"""The page and the command that writes it."""

from __future__ import annotations

import errno
import html
import io
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from rich.console import Console

from embodied_rl.commands.report import main
from embodied_rl.errors import UserError
from embodied_rl.launch import run as launch_run
from embodied_rl.monitoring.console import RunConsole
from embodied_rl.report import page, recording
from embodied_rl.report.data import read_run
from embodied_rl.report.facts import note_end, note_start
from embodied_rl.report.recording import recorded
from embodied_rl.report.settings import settings
from tests.configs import tiny_run
from tests.report.runs import ROWS, make_run


def text_of(path: Path) -> str:
    """The page's words, with one space between."""
    body = re.sub(r"<style.*?</style>", "", path.read_text(), flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body)))


def test_page_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", changes={"runner.about": "PPO on <two> tasks"})
    main([str(run)])
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
    words = text_of(run / "report.html")
    assert "PPO on <two> tasks" in words
    assert "25.0 % → 87.5 %" in words and "success after 4 training steps" in words
    assert "+62.5 points (95 % interval +25.0 to +87.5)" in words
    assert "0 put the red block number 0 into the box beside the plate 4 50.0 % 100.0 % +50.0" in words
    assert "actor/entropy was not finite at 1 step" in words
    assert "rollout 21.0 s (48.8 %)" in words
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_somebody_writes_every_metric_that_is_drawn() -> None:
    package = Path(page.__file__).parents[1]
    texts = [path.read_text() for path in package.rglob("*.py") if path.parent.name not in ("report", "monitoring")]
    for name in (name.rpartition("/")[2] for name in page._SIGNALS if not name.startswith("perf/")):
        assert any(f'"{name}"' in text or f'/{name}"' in text for text in texts), name


def test_page_holds_nothing_from_elsewhere(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    main([str(run)])
    content = (run / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="(?!#|data:)([^"]*)"', content)
    assert sources == [] and "<script" not in content and "@import" not in content
    assert len(content) < 500_000


def test_same_run_same_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    pages = []
    for name in ("a", "b"):
        main([str(run), "--output", str(tmp_path / f"{name}.html")])
        pages.append(re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d \w+", "", (tmp_path / f"{name}.html").read_text()))
    assert pages[0] == pages[1]


def test_several_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [make_run(tmp_path / f"seed{seed}", changes={"actor.seed": seed}) for seed in (1, 2)]
    main(list(map(str, runs)))
    assert capsys.readouterr().out == "report: report.html\n"
    words = text_of(tmp_path / "report.html")
    assert "by_hand: mean of 2 runs, 95 % interval" in words and "mean of 2 runs: +62.5 points" in words


def test_two_recipes_are_held_against_each_other(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "a")
    worse = make_run(
        tmp_path / "b", changes={"actor.optim.lr": 0.1}, evaluated={0: [[0] * 4] * 2, 4: [[1, 0, 0, 0]] * 2}
    )
    main([str(plain), str(worse), "--output", str(tmp_path / "both.html")])
    words = text_of(tmp_path / "both.html")
    assert "−62.5 points (95 % interval −87.5 to −25.0) actor.optim.lr=0.1 against actor.optim.lr=0.001" in words


@pytest.mark.parametrize("task", ["math", "sft", "embodied_sft", "collect"])
def test_runs_of_which_little_is_known(task: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rows=[], evaluated={}, changes={"runner.task_type": task})
    main([str(run)])
    assert "No success has been measured so far." in text_of(run / "report.html")
    assert not (run / "curve.png").exists()


def test_text_of_a_run_is_no_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", changes={"runner.experiment_name": "<b>&'\"bold"})
    main([str(run)])
    assert "<h1>&lt;b&gt;&amp;&#39;&#34;bold</h1>" in (run / "report.html").read_text()


def test_only_an_evaluation(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rows=ROWS[:1], evaluated={0: [[1, 0, 0, 0]]}, changes={"runner.only_eval": True})
    main([str(run)])
    words = text_of(run / "report.html")
    assert "evaluated" in words and "25.0 % success in evaluation before any training here" in words


def test_follow_writes_until_the_run_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rows=ROWS[:2], evaluated={})
    note_start(run, [])
    following = threading.Thread(target=main, args=([str(run), "--follow", "--every", "0.1"],))
    following.start()
    wait_for(lambda: (run / "report.html").exists())
    assert "under way after 1 of 4 steps" in text_of(run / "report.html")
    assert 'http-equiv="refresh"' in (run / "report.html").read_text()
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines + '{"step": 2, "env/success_once": 0.625, "time/step": 1.0}\n')
    wait_for(lambda: "under way after 2 of 4 steps" in text_of(run / "report.html"))
    note_end(run, "interrupted")
    following.join(30)
    assert not following.is_alive()
    assert "interrupted after 2 of 4 steps" in text_of(run / "report.html")
    assert 'http-equiv="refresh"' not in (run / "report.html").read_text()


def wait_for(condition: object, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing: no such directory"),
        (["{run}", "{run}"], "named twice"),
        (["{run}", "--every", "0"], "--every 0: expected a positive number"),
    ],
)
def test_refusals(arguments: list[str], message: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(UserError, match=message):
        main([text.format(run=run) for text in arguments])


def test_help_needs_neither_torch_nor_matplotlib() -> None:
    code = """
import sys
from embodied_rl.cli import main
try:
    main(["report", "--help"])
except SystemExit as ending:
    assert not ending.code
print("loaded:", [name for name in ("torch", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--follow" in done.stdout and "loaded: []" in done.stdout


def test_a_run_ends_with_its_page(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "runner.max_steps=2", "runner.val_before_train=true", "runner.report=true")
    launch_run(config)
    [run] = (tmp_path / "results").glob("*/*")
    found = read_run(run)
    assert found.state == "finished after 2 steps" and [start["ending"] for start in found.starts] == ["finished"]
    words = text_of(run / "report.html")
    assert "Where the time went" in words and "torch" in words and (run / "curve.png").is_file()
    assert f"report:     {run / 'report.html'}" in (run / "run.log").read_text().replace("\n", " ")


def test_a_page_that_fails_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = make_run(tmp_path / "run"), io.StringIO()
    monkeypatch.setattr(page, "write_page", lambda *_: 1 / 0)
    with recorded(run, None, Console(file=out, width=200), page=True):
        pass
    assert f"no report: division by zero; python train.py report {run}" in out.getvalue()


def test_the_end_of_a_run_is_noted_and_drawn_whatever_it_is(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", changes={"runner.max_steps": 9})
    with pytest.raises(KeyboardInterrupt), recorded(run, [], Console(file=io.StringIO()), page=True):
        raise KeyboardInterrupt
    assert "interrupted after 4 of 9 steps" in text_of(run / "report.html")


def test_without_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with recorded(run, [], Console(file=io.StringIO()), page=False):
        pass
    assert (run / "run.json").exists() and not (run / "report.html").exists()


def test_settings_that_are_not_the_defaults(tmp_path: Path) -> None:
    command = ["experiment=dummy_grpo", "actor.optim.lr=0.5", "runner.report=false"]
    config = tiny_run(tmp_path, *command)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    note_start(run, command)
    found = settings(read_run(run))
    assert found is not None
    assert {"task=embodied", "env=dummy", "model=mlp", "algorithm=grpo"} <= set(found.against.split())
    rows = {row.key: (row.value, row.default, row.origin) for row in found.rows}
    assert rows["actor.optim.lr"] == ("0.5", "0.001", "command line")
    assert rows["runner.max_steps"] == ("60", "3", "experiment/dummy_grpo")
    assert "algorithm.gamma" not in rows


def test_settings_within_a_run_that_hydra_started(tmp_path: Path) -> None:
    """As of a sweep."""
    run = make_run(tmp_path / "run")
    with initialize_config_module("embodied_rl.config", version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        assert settings(read_run(run)) is not None
        assert GlobalHydra.instance().hydra is outer


def test_a_full_disk_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither ``run.json`` nor ``run.log`` nor the page may stand in front of what ended the run."""
    run, console = make_run(tmp_path / "run"), RunConsole(file=io.StringIO())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fail() -> None:
        with console.logging_to(Path("/dev/full")), recorded(run, None, console, page=True):
            console.print("a line")
            raise UserError("the run's own")

    monkeypatch.setattr(recording, "note_end", full)
    with pytest.raises(UserError, match="the run's own"):
        fail()
