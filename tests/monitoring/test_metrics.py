from __future__ import annotations

import builtins
import io
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich
import torch
from rich.console import Console

from embodied_rl.errors import UserError
from embodied_rl.monitoring.backend import RunInfo
from embodied_rl.monitoring.builtin import logged_before
from embodied_rl.monitoring.metrics import MetricLogger, backend_problems


def make(
    backends: list[str], run_dir: Path, *, first_step: int = 0, console: Console | None = None,
    wandb_options: Mapping[str, Any] | None = None,
) -> MetricLogger:  # fmt: skip
    run = RunInfo(
        run_dir=run_dir,
        project_name="project",
        experiment_name="experiment",
        config={"env": {"name": "toy"}},
        wandb_options=wandb_options or {},
        first_step=first_step,
        console=console or rich.get_console(),
    )
    return MetricLogger(backends, run)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_unknown_and_doubled_backends(tmp_path: Path) -> None:
    [problem] = backend_problems(["console", "tensorbord"], {})
    assert "logger_backends: got 'tensorbord'" in problem and "Did you mean 'tensorboard'" in problem
    [problem] = backend_problems(["jsonl", "console", "jsonl"], {})
    assert "'jsonl' is listed twice" in problem
    with pytest.raises(UserError, match="'jsonl' is listed twice"):
        make(["jsonl", "jsonl"], tmp_path)


def test_values_are_numbers_and_steps_do_not_go_back(tmp_path: Path) -> None:
    with make(["jsonl"], tmp_path, first_step=3) as logger:
        logger.log(2, {"a": torch.tensor(1.5), "b": 2, "c": torch.tensor([3.0])}, prefix="actor")
        with pytest.raises(ValueError, match="metric 'x': got 'high', expected one number"):
            logger.log(2, {"x": "high"})
        with pytest.raises(ValueError, match="metric 'x'"):
            logger.log(2, {"x": torch.ones(2)})
        with pytest.raises(ValueError, match="step 1 after step 2"):
            logger.log(1, {"x": 1.0})
    assert lines(tmp_path) == [{"step": 2, "actor/a": 1.5, "actor/b": 2.0, "actor/c": 3.0}]


def test_jsonl_has_one_line_per_step_at_once(tmp_path: Path) -> None:
    logger = make(["jsonl"], tmp_path)
    logger.log(0, {"a": 1})
    assert lines(tmp_path) == [{"step": 0, "a": 1.0}], "flushed before close"
    logger.log(1, {"a": 2})
    logger.log(1, {"success": 0.5, "bad": math.nan}, prefix="eval")
    assert lines(tmp_path) == [{"step": 0, "a": 1.0}, {"step": 1, "a": 2.0, "eval/success": 0.5, "eval/bad": None}]
    logger.log(4, {"a": math.inf})
    logger.close()
    assert lines(tmp_path)[2:] == [{"step": 4, "a": None}]


def test_jsonl_resume_drops_what_will_be_logged_again(tmp_path: Path) -> None:
    with make(["jsonl"], tmp_path) as logger:
        for step in range(6):
            logger.log(step, {"a": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "a"')  # killed while writing
    with make(["jsonl"], tmp_path, first_step=4) as logger:
        assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3]
        logger.log(3, {"eval": 30})
        logger.log(4, {"a": 40})
        logger.log(4, {"b": 41})
    assert lines(tmp_path)[2:] == [
        {"step": 2, "a": 2.0},
        {"step": 3, "a": 3.0, "eval": 30.0},
        {"step": 4, "a": 40.0, "b": 41.0},
    ]


def test_jsonl_of_a_fresh_run_replaces_an_old_file(tmp_path: Path) -> None:
    for value in (1, 2):
        with make(["jsonl"], tmp_path) as logger:
            logger.log(0, {"a": value})
    assert lines(tmp_path) == [{"step": 0, "a": 2.0}]


def test_jsonl_refuses_a_file_it_does_not_understand(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nhello\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: expected a JSON object with a 'step'"):
        make(["jsonl"], tmp_path, first_step=1)


def test_tensorboard_events_read_back_and_resume_hides_repeated_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with make(["tensorboard"], tmp_path) as logger:
        for step in range(5):
            logger.log(step, {"env/success_once": step / 10})
    time.sleep(1.1)  # files are read in the order of their names: the second, then a count without leading zeros
    with make(["tensorboard"], tmp_path, first_step=3) as logger:
        logger.log(3, {"env/success_once": 0.75})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    got = [(event.step, event.value) for event in events.Scalars("env/success_once")]
    assert got == [(0, 0.0), (1, pytest.approx(0.1)), (2, pytest.approx(0.2)), (3, 0.75)]


def test_several_backends_get_the_same(tmp_path: Path) -> None:
    out = io.StringIO()
    with make(["verbose", "jsonl"], tmp_path, console=Console(file=out, width=80)) as logger:
        logger.log(12, {"success_once": 0.4375}, prefix="env/")
    assert "step 12" in out.getvalue()
    assert "success_once" in out.getvalue()
    assert "0.4375" in out.getvalue()
    assert lines(tmp_path) == [{"step": 12, "env/success_once": 0.4375}]


def test_a_backend_that_cannot_start_closes_the_others(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such option"):
        make(["jsonl", "wandb"], tmp_path, wandb_options={"entty": "me"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entty": "me"}, r"logger.wandb.entty: wandb.init has no such option. Did you mean 'entity'"),
        ({"api_key": "123"}, "no key belongs in one"),
        ({"settings": {"api_key": "123"}}, "no key belongs in one"),
        ({"project": "p"}, "it follows from logger.project_name"),
    ],
)
def test_wandb_options_are_checked(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    pytest.importorskip("wandb")
    with pytest.raises(UserError, match=message):
        make(["wandb"], tmp_path, wandb_options=options)


@pytest.mark.parametrize(
    ("backend", "package", "command"),
    [("wandb", "wandb", "pip install 'wandb>=0.19'"),
     ("tensorboard", "torch.utils.tensorboard", "pip install tensorboard")],
)  # fmt: skip
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, package: str, command: str
) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == package:
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=command):
        make([backend], tmp_path)


def test_wandb_offline_run_needs_no_network_and_resumes_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens: any request would fail
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    video = tmp_path / "a.mp4"
    video.write_bytes(b"0000")
    run_dir = tmp_path / "run"
    with make(["wandb", "jsonl"], run_dir, wandb_options={"mode": "offline"}) as logger:
        logger.log(0, {"env/success_once": 0.5})
        logger.log_video(0, "eval/video", video)
    run_id = (run_dir / "wandb_run_id.txt").read_text().strip()
    stored = list((run_dir / "wandb").glob(f"offline-run-*-{run_id}"))
    assert len(stored) == 1
    assert (stored[0] / f"run-{run_id}.wandb").stat().st_size > 0
    assert list(stored[0].rglob("*.mp4")), "the video is part of the run"
    with make(["wandb"], run_dir, first_step=1, wandb_options={"mode": "offline"}) as logger:
        logger.log(1, {"env/success_once": 0.6})
    assert (run_dir / "wandb_run_id.txt").read_text().strip() == run_id


def test_tensorboard_opens_with_what_matters(tmp_path: Path) -> None:
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import IMAGES, EventAccumulator

    from embodied_rl.evaluation.video import VideoRecorder

    recorder = VideoRecorder(fps=20, tile_size=128)
    for step in range(40):
        frame = np.full((64, 64, 3), 5 * step, np.uint8)
        recorder.record(0, frame, instruction="reach", episode_step=step, reward=0.0, success=False)
    video = recorder.finish(tmp_path / "task_03.mp4")
    assert video is not None
    with make(["tensorboard"], tmp_path) as logger:
        for step, success in ((1, 0.25), (2, 0.5)):
            metrics = {"episodes": 8, "success_once": success, "return": 1.0, "steps_total": 100 * step}
            logger.log(step, metrics, prefix="env")
        logger.log(2, {"success_rate": 0.75}, prefix="eval")
        logger.log_video(2, "eval/task_03", video)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={IMAGES: 0}).Reload()
    tags = sorted(events.Tags()["scalars"])
    assert tags[:3] == ["0_overview/evaluated success", "0_overview/return", "0_overview/success"]
    assert [(e.step, e.value) for e in events.Scalars("0_overview/success")] == [(1, 0.25), (2, 0.5)]
    [settings] = events.Tensors("config/text_summary")
    assert b"name: toy" in settings.tensor_proto.string_val[0]
    [picture] = events.Images("eval/task_03")
    with Image.open(io.BytesIO(picture.encoded_image_string)) as gif:
        assert (gif.format, getattr(gif, "n_frames", 1)) == ("GIF", 8), "two seconds, four frames each"
        assert gif.width <= 320
    by_env_steps = EventAccumulator(str(tmp_path / "tensorboard/by_env_steps")).Reload()
    assert [(e.step, e.value) for e in by_env_steps.Scalars("0_overview/success")] == [(100, 0.25), (200, 0.5)]


def test_texts_reach_tensorboard_and_no_other(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with make(["jsonl", "tensorboard"], tmp_path) as logger:
        logger.log(1, {"a": 1})
        logger.log_text(1, "eval/samples", "**prompt** 57+68=")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    [event] = events.Tensors("eval/samples/text_summary")
    assert event.step == 1
    assert event.tensor_proto.string_val == [b"**prompt** 57+68="]
    assert lines(tmp_path) == [{"step": 1, "a": 1.0}]


def test_what_was_logged_at_a_step_is_found_again(tmp_path: Path) -> None:
    assert logged_before(tmp_path, "env/steps_total", 2) is None
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "env/steps_total": 10.0}\n{"step": 2, "env/steps_total": 25.0}\n'
        '{"step": 3, "a": 1.0}\n{"step": 4, "env'
    )
    found = [logged_before(tmp_path, "env/steps_total", step) for step in (0, 1, 2, 3, 4)]
    assert found == [None, 10.0, 25.0, None, None]
