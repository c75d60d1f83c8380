"""Damaged files in front of runs that read them: every file of a run that is resumed, of demonstrations, of prompts."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.faults.campaign import FAMILIES, LIMIT_S, Verdict
from benchmarks.faults.driven import Driven
from benchmarks.faults.exploding import Exploding
from benchmarks.faults.victims import FOLDER
from embodied_rl.errors import UserError

_QUICK: Final = ("cluster=serial", "runner.report=false", "runner.eval_at_end=false", "runner.val_before_train=false")
_TINY: Final = FAMILIES["math"][1:-1]

EXPLODED: Final = "exploded"
"""The folder that a pickle makes when it is read."""

Damage = Callable[[Path, random.Random], object]


def _truncate(path: Path, random: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: random.randrange(max(len(data), 1))])


def _flip(path: Path, random: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def _folder(path: Path, random: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path, random: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nothing"))


def _foreign(path: Path, random: random.Random) -> None:
    """The content of another file of the same kind."""
    others = [
        p for p in path.parents[2].rglob(f"*{path.suffix}") if p.is_file() and p.read_bytes() != path.read_bytes()
    ]
    path.write_bytes(random.choice(others).read_bytes() if others else b"{}")


DAMAGES: Final[dict[str, Damage]] = {
    "truncated": _truncate,
    "flipped bit": _flip,
    "empty": lambda path, random: path.write_bytes(b""),
    "removed": lambda path, random: path.unlink(),
    "folder": _folder,
    "dangling link": _link,
    "foreign": _foreign,
    "noise": lambda path, random: path.write_bytes(random.randbytes(path.stat().st_size)),
    "zeros": lambda path, random: path.write_bytes(bytes(path.stat().st_size)),
    "huge header": lambda path, random: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
    "deep nesting": lambda path, random: path.write_bytes(b"[" * 100_000),
    "a list": lambda path, random: path.write_text("[1, 2]"),
    "not a number": lambda path, random: path.write_text('{"step": NaN, "a": "\\ud800"}\n'),
    "pickle": lambda path, random: path.write_bytes(pickle.dumps(Exploding(path.parent / EXPLODED))),
}


def damaged_files(folder: Path, family: str, count: int, seed: int) -> Iterator[Verdict]:
    """So many cases: each a copy of what a run left, one file of it damaged, and a run that reads it."""
    prepare, arguments, read = _SUBJECTS[family]
    chosen, base = random.Random(seed), folder / f"base_{family}"
    if not base.exists():
        base.mkdir()
        for step in prepare(base):
            _carried_out(step, base, expected=0)
    paths = sorted(p.relative_to(base) for name in read for p in base.glob(name) if p.is_file())
    every = [(path, name) for path in paths for name in DAMAGES]
    chosen.shuffle(every)
    for number, (path, name) in enumerate(every[:count]):
        case = folder / f"file_{family}_{number:05d}"
        shutil.copytree(base, case)
        (case / "output.txt").unlink(missing_ok=True)
        DAMAGES[name](case / path, chosen)
        verdict = Verdict(case=number, family=family, backend="files", fault=name, file=str(path))
        _judge(case, path, arguments(case), verdict)
        if not verdict.wrong:
            shutil.rmtree(case)
        yield verdict


def _judge(case: Path, path: Path, arguments: Sequence[str], verdict: Verdict) -> None:
    run = Driven(arguments, case, {FOLDER: str(case), "OMP_NUM_THREADS": "1"})
    verdict.status = run.wait(LIMIT_S)
    text = run.said()
    if verdict.status is None:
        verdict.outcome = "hang"
        verdict.wrong.append(f"no end within {LIMIT_S:g} s")
        run.kill()
    else:
        verdict.outcome = "goes on" if verdict.status == 0 else "ended"
    in_checkpoint = any(part.startswith("global_step_") for part in path.parts)
    if in_checkpoint and verdict.status == 0 and "weights of:" in text:
        verdict.wrong.append("a damaged checkpoint was taken")
    if verdict.status not in (0, 2, None):
        verdict.wrong.append(f"exit status {verdict.status}: {text[-800:]}")
    if "Traceback" in text:
        verdict.wrong.append(f"a traceback: {text[-800:]}")
    names = [path.name, *(part for part in path.parts if part.startswith("global_step_")), path.parts[0]]
    if verdict.status == 2 and not any(name in text for name in names):
        verdict.wrong.append(f"not named: {text[-400:]}")
    if list(case.rglob(EXPLODED)):
        verdict.wrong.append("the pickle was read")
    verdict.wrong += [f"left behind: {name}" for name in run.leftovers()]


def _carried_out(arguments: Sequence[str], folder: Path, *, expected: int) -> None:
    run = Driven(arguments, folder, {FOLDER: str(folder), "OMP_NUM_THREADS": "1"})
    if run.wait(LIMIT_S) != expected:
        raise UserError(f"{' '.join(arguments)}: {run.said()[-2000:]}")
    run.leftovers()


def _dummy(base: Path) -> Sequence[Sequence[str]]:
    return [[*_resumed_dummy(base), "runner.max_steps=2"]]


def _resumed_dummy(base: Path) -> list[str]:
    return [
        *FAMILIES["dummy"],
        *_QUICK,
        "algorithm=ppo",
        "env.train.auto_reset=true",
        "env.train.max_steps_per_rollout_epoch=8",
        "runner.logger.logger_backends=[jsonl]",
        f"runner.output_dir={base}",
        "runner.experiment_name=run",
        "runner.resume_dir=auto",
        "runner.max_keep=1",
        "runner.max_steps=3",
    ]


def _math(base: Path) -> Sequence[Sequence[str]]:
    """A run on prompts from a file."""
    for name in ("train.jsonl", "eval.jsonl"):
        rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(24)]
        (base / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [[*_resumed_math(base), "runner.max_steps=1"]]


def _resumed_math(base: Path) -> list[str]:
    tiny = [text for text in _TINY if not text.startswith("data.params")]
    return [
        "task=math",
        *tiny,
        *_QUICK,
        "data=files",
        f"data.params.train_data_paths=[{base / 'train.jsonl'}]",
        f"data.params.val_data_paths=[{base / 'eval.jsonl'}]",
        "reward.function=benchmarks.faults.victims:score",
        "runner.logger.logger_backends=[jsonl]",
        f"runner.output_dir={base}",
        "runner.experiment_name=run",
        "runner.resume_dir=auto",
        "runner.max_keep=1",
        "runner.max_steps=2",
    ]


def _demonstrations(base: Path) -> Sequence[Sequence[str]]:
    return [["task=collect", "env=dummy", "cluster=serial", f"collect.path={base / 'recorded'}",
             "collect.episodes_per_task=2", f"runner.output_dir={base / 'collecting'}"]]  # fmt: skip


def _imitation(base: Path) -> list[str]:
    return ["task=sft", "env=dummy", "model=mlp", *_QUICK, f"data.path={base / 'recorded'}", "runner.max_steps=1",
            "runner.save_interval=-1", f"runner.output_dir={base / 'results'}"]  # fmt: skip


_SUBJECTS: Final[
    dict[str, tuple[Callable[[Path], Sequence[Sequence[str]]], Callable[[Path], list[str]], tuple[str, ...]]]
] = {
    "dummy": (_dummy, _resumed_dummy, ("run/**/*",)),
    "math": (_math, _resumed_math, ("run/**/*", "*.jsonl")),
    "demonstrations": (_demonstrations, _imitation, ("recorded/**/*",)),
}
"""Family -> the command lines that make the files, the one that reads them, and which they are."""
