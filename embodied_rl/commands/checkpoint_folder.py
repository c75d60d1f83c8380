"""``doctor`` on this project's own checkpoints and run directories."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from embodied_rl.checkpoints.resume import CONFIG_FILE, read_config
from embodied_rl.checkpoints.store import STATE_FILE, complete_checkpoints, read_state, verify
from embodied_rl.commands.terminal import Finding, ok, problem, until_problem, warning
from embodied_rl.commands.weights_folder import read_header
from embodied_rl.errors import CheckpointError, listed
from embodied_rl.files import parse_json
from embodied_rl.params import argument

_RECORD: Final = "policy.json"
_ACTOR: Final = "actor"
_UNFINISHED: Final = ".global_step_*"


def is_checkpoint(folder: Path) -> bool:
    return (folder / STATE_FILE).is_file() or (folder / _ACTOR).is_dir()


def is_run(folder: Path) -> bool:
    return (folder / "checkpoints").is_dir() or (folder / CONFIG_FILE).is_file()


def run_findings(run: Path) -> Iterator[Finding]:
    """Checks of a run directory and its newest checkpoint."""
    yield _settings(run / CONFIG_FILE)
    directory = run / "checkpoints"
    yield from _unfinished(directory)
    whole = complete_checkpoints(directory)
    if not whole:
        yield problem("checkpoints", "no whole one", "train with runner.save_interval of 1 or more")
        return
    yield ok("checkpoints", f"{len(whole)} whole: {listed([path.name for path in whole])}")
    yield from checkpoint_findings(whole[-1])


def _settings(path: Path) -> Finding:
    if not path.exists():
        advice = "the run can be resumed all the same; its settings cannot be compared"
        return warning("run", f"no {CONFIG_FILE}", advice)
    try:
        config = read_config(path)
    except CheckpointError as error:
        return problem("run", str(error))
    model, runner = config.get("model") or {}, config.get("runner") or {}
    text = f"{runner.get('task_type')}, model {model.get('model_type')}, runner.max_steps {runner.get('max_steps')}"
    return ok("run", text)


def checkpoint_findings(checkpoint: Path) -> Iterator[Finding]:
    """Checks of one checkpoint."""
    try:
        state = read_state(checkpoint)
        yield ok("checkpoint", f"{checkpoint.name}: after {state.step} training steps")
        saved = verify(checkpoint)
        size = sum(file.bytes for file in saved.values())
        yield ok("files", f"{len(saved)}, {size / 2**20:,.1f} MiB, as they were saved (SHA-256)")
    except CheckpointError as error:
        yield problem("checkpoint", str(error))
        return
    yield from until_problem(_contents(checkpoint / _ACTOR))
    record = _record(checkpoint)
    if isinstance(record, Finding):
        yield record
        return
    lora = record["model"]["lora"]
    adapters = f", adapters of rank {lora['rank']}" if lora["rank"] else ""
    yield ok("policy", f"{record['model']['model_type']}{adapters}; {_described(record['spec'])}")
    base = record["model"]["path"]
    if base is not None:
        local = Path(base).is_absolute()
        if local and not Path(base).is_dir():
            yield warning(
                "base", f"model.path was {base}, which is not here", "export needs it: base=<where it is now>"
            )
        else:
            yield ok("base", f"model.path was {base}")
    yield ok("written with", ", ".join(f"{name} {version}" for name, version in record["versions"].items()))
    resumed, begun = (shlex.quote(argument(f"runner.{key}", str(checkpoint))) for key in ("resume_dir", "init_from"))
    yield ok("use it with", f"{resumed} (to go on or evaluate), {begun}")
    yield ok("make a folder", f"python train.py export {shlex.quote(str(checkpoint))} <folder>")


def _contents(actor: Path) -> Iterator[Finding]:
    """Contents of the shards."""
    files = sorted(actor.glob("*.safetensors"))
    headers = [read_header(file, "contents", "use another one of the run") for file in files]
    parts = [(name, *part) for header in headers for name, part in header.items()]
    model = [(name, dtype, elements) for name, dtype, elements in parts if name.startswith("model.")]
    types = ", ".join(sorted({dtype for _, dtype, _ in model}))
    numbers, tensors = sum(elements for *_, elements in model), {name for name, *_ in model}
    text = f"{numbers:,} numbers in {len(tensors)} tensors ({types}), in {len(files)} file(s)"
    if not model:
        yield problem("contents", "no weights", "use another checkpoint")
    elif any(name.startswith("optimizer.") for name, *_ in parts):
        yield ok("contents", f"model and optimiser: {text}")
    else:
        yield ok("contents", f"model alone: {text}", "no run goes on from it: to evaluate, export, or runner.init_from")


def _record(checkpoint: Path) -> dict[str, Any] | Finding:
    advice = "it can be resumed and evaluated, not exported"
    try:
        content = parse_json((checkpoint / _RECORD).read_text())
        _ = content["model"]["lora"]["rank"], content["spec"], content["versions"], content["model"]["path"]
    except FileNotFoundError:
        return warning("policy", f"no {_RECORD}: saved before checkpoints had one", advice)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return problem("policy", f"{_RECORD} cannot be read ({error})", advice)
    return content


def _described(spec: dict[str, Any]) -> str:
    if not spec["state_dim"] and not spec["image_shapes"]:
        return f"answers of at most {spec['num_action_chunks']} tokens"
    cameras = "".join(f", {name} {height}×{width}" for name, (height, width) in spec["image_shapes"].items())
    value = ", value head" if spec["values_per_chunk"] else ""
    return f"{spec['num_action_chunks']}×{spec['action_dim']} actions from {spec['state_dim']} states{cameras}{value}"


def _unfinished(directory: Path) -> Iterator[Finding]:
    left = sorted(path.name for path in directory.glob(_UNFINISHED))
    if left:
        advice = "a save was interrupted, or goes on now; the next save of the run removes them"
        yield warning("interrupted", listed(left), advice)
