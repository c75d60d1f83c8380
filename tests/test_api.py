"""The project from Python: results, callbacks, scripts without a guard."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import embodied_rl as er
from embodied_rl.checkpoints.policy_record import PolicyRecord
from embodied_rl.checkpoints.shards import load_weights
from embodied_rl.commands.export import EXPORT_FILE, export
from embodied_rl.contracts import EnvObs
from embodied_rl.models.registry import policy_of
from tests.packaging.documented import blocks

ROOT = Path(__file__).resolve().parents[1]


def tiny(directory: Path) -> tuple[str, ...]:
    return (
        "env=dummy",
        f"runner.output_dir={directory / 'results'}",
        f"env.eval.video_cfg.video_base_dir={directory / 'videos'}",
        "env.eval.video_cfg.save_video=false",
        "env.train.total_num_envs=16",
        "env.train.max_episode_steps=16",
        "env.eval.total_num_envs=8",
        "env.eval.max_episode_steps=16",
        "env.eval.episodes_per_task=2",
        "runner.logger.logger_backends=[jsonl]",
        "runner.report=false",
        "runner.save_interval=1",
        "runner.val_check_interval=1",
    )


class Notes(er.Callback):
    def __init__(self, stop_at: int | None = None) -> None:
        self.heard: list[str] = []
        self.stop_at = stop_at

    def on_start(self, run: er.Run) -> None:
        assert not run.metrics
        self.heard.append("start")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        assert metrics["time/step"] > 0
        self.heard.append(f"step {step}")
        if step == self.stop_at:
            raise er.StopTraining

    def on_evaluation(self, step: int, evaluation: er.Evaluation) -> None:
        assert evaluation.step == step
        assert evaluation.rate is not None
        self.heard.append(f"evaluation {step}")

    def on_save(self, step: int, path: Path) -> None:
        assert (path / "policy.json").is_file() or any(path.rglob("policy.json"))
        self.heard.append(f"save {step}")

    def on_end(self, run: er.Run) -> None:
        assert run.last is not None
        self.heard.append("end")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[er.Run, list[str]]:
    notes, directory = Notes(), tmp_path_factory.mktemp("run")
    return er.train(*tiny(directory), "cluster=serial", "runner.max_steps=2", callbacks=[notes]), notes.heard


def test_a_run_tells_its_results(trained: tuple[er.Run, list[str]]) -> None:
    run, heard = trained
    first, second = ["save 1", "step 1", "evaluation 1"], ["save 2", "step 2", "evaluation 2"]
    assert [word for word in heard if word != "evaluation 0"] == ["start", *first, *second, "end"]
    assert run.success == run.evaluations[2].rate
    assert run.last is not None and run.last.name == "global_step_2"
    assert run.best in run.checkpoints.values()
    assert {row["step"] for row in run.metrics} >= {1, 2}
    assert er.Run.open(run.directory.parent) == run
    assert "<table>" in run._repr_html_()


def test_a_run_is_found_from_every_working_directory(
    trained: tuple[er.Run, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = trained
    monkeypatch.chdir(run.directory.parent)
    opened = er.Run.open(run.directory.name)
    monkeypatch.chdir(tmp_path)
    assert opened.directory == run.directory
    assert opened.last is not None and opened.last == run.last


def test_evaluation_needs_the_checkpoint_alone(trained: tuple[er.Run, list[str]]) -> None:
    run, _ = trained
    again = er.evaluate(run.last or "")
    assert again.tasks == run.evaluations[2].tasks
    file = run.directory / "config.yaml"
    written = yaml.safe_load(file.read_text())
    del written["runner"]["about"], written["env"]["eval"]["sampled"]
    file.write_text(yaml.safe_dump(written))  # as an earlier version wrote it
    assert er.evaluate(run, "env.eval.episodes_per_task=1").count < again.count
    with pytest.raises(er.ConfigError, match="episodes_per_tsk"):
        er.evaluate(run, "env.eval.episodes_per_tsk=1")
    for group in ("eval_env=dummy", "env@eval_env=dummy", "env=dummy", "model=mlp"):
        with pytest.raises(er.UserError) as caught:
            er.evaluate(run, group)
        said = str(caught.value)
        assert said.startswith(
            f"{group}: expected key=value, such as env.eval.episodes_per_task=2; groups are the run's"
        )
        command = f"add eval_env=dummy runner.only_eval=true runner.resume_dir={run.last}"
        assert (command in said) == ("env" in group)
    assert er.evaluate(run, "eval_env=null", "env.eval.episodes_per_task=1").count < again.count


def test_a_loaded_policy_acts_as_the_checkpoints(trained: tuple[er.Run, list[str]], tmp_path: Path) -> None:
    checkpoint = trained[0].last
    assert checkpoint is not None
    record = PolicyRecord.read(checkpoint)
    policy = policy_of(record.model, record.spec).eval()
    load_weights(policy, checkpoint)
    state = np.random.default_rng(0).normal(size=record.spec.state_dim).astype(np.float32)
    obs = EnvObs(
        env_ids=torch.zeros(1, dtype=torch.int64), images={}, state=torch.from_numpy(state[None]), instructions=("go",)
    )
    with torch.inference_mode():
        expected = policy.act(obs, greedy=True, temperature=1.0, generator=None).actions[0].numpy()
    np.testing.assert_array_equal(er.load_policy(checkpoint).act(state, instruction="go"), expected)
    out = tmp_path / "exported"
    export(checkpoint, out)
    np.testing.assert_array_equal(er.load_policy(out).act(state, instruction="go"), expected)
    for wrong in (np.nan, np.inf, 1e300):
        with pytest.raises(er.UserError, match=r"state: got NaN or infinity at 2, expected finite float32 numbers"):
            er.load_policy(out).act([0, 0, wrong, 0], instruction="go")  # type: ignore[arg-type]
    (out / EXPORT_FILE).write_text('{"model_type": "mlp", "base": null, "params": {}}')
    with pytest.raises(
        er.UserError, match=r"does not say which policy this is \(KeyError: 'record'\); export it again"
    ):
        er.load_policy(out)
    assert np.abs(expected).max() > 0


def test_a_callback_ends_the_training_with_a_checkpoint(tmp_path: Path) -> None:
    notes = Notes(stop_at=1)
    options = ("cluster=serial", "runner.max_steps=5", "runner.save_interval=5", "runner.val_check_interval=-1")
    run = er.train(*tiny(tmp_path), *options, callbacks=[notes])
    assert [path.name for path in run.checkpoints.values()] == ["global_step_1"]
    assert notes.heard[-3:] == ["step 1", "save 1", "end"]


def test_mistakes_are_exceptions() -> None:
    with pytest.raises(er.ConfigError, match="max_stepz"):
        er.train("env=dummy", "runner.max_stepz=1")
    with pytest.raises(er.UserError, match=r"workers do not execute your script.*path/to/file\.py:Cart"):
        er.train("env=dummy", "env.env_type=__main__:Cart")


def test_a_quiet_run_prints_into_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = er.train(*tiny(tmp_path), "cluster=serial", "runner.max_steps=1", quiet=True)
    er.evaluate(run, quiet=True)
    assert capfd.readouterr() == ("", "")
    assert "finished: step 1/1" in (run.directory / "run.log").read_text()


def test_a_run_in_another_thread_refuses_a_second(tmp_path: Path) -> None:
    refused: list[str] = []
    ended: list[er.Run] = []

    class Nested(er.Callback):
        def on_start(self, run: er.Run) -> None:
            with pytest.raises(er.UserError, match="__main__") as error:
                er.train("env=dummy")
            refused.append(str(error.value))

    def work() -> None:
        ended.append(er.train(*tiny(tmp_path), "cluster=serial", "runner.max_steps=1", callbacks=[Nested()]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert refused and ended[0].last is not None


@pytest.mark.slow
def test_a_script_without_guard_is_executed_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import embodied_rl as er\nprint('only once')\n"
        f"run = er.train(*{tiny(tmp_path)!r}, 'runner.max_steps=1')\nprint('reached', run.success is not None)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("only once") == 1 and "reached True" in done.stdout
    assert len(list((tmp_path / "results").glob("*/*"))) == 1


@pytest.mark.slow
def test_the_page_s_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [block for block in blocks(Path("docs/python.md")) if block.language == "python"]
    monkeypatch.chdir(tmp_path)
    small = [*tiny(tmp_path), "cluster=serial", "runner.max_steps=2", "algorithm=grpo", "model=mlp"]
    code = block.text.replace('"experiment=dummy_grpo", "runner.val_check_interval=20"', ", ".join(map(repr, small)))
    assert code != block.text
    names: dict[str, Any] = {}
    exec(code, names)
    assert np.shape(names["actions"])[1] == 2
