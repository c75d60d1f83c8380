"""``doctor`` on a folder of weights or of adapters: nothing is loaded, only headers and small files are read. No torch
here."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from embodied_rl.commands.export import EXPORT_FILE, use_of
from embodied_rl.commands.terminal import Finding, ProblemError, ok, problem, until_problem, warning
from embodied_rl.errors import listed
from embodied_rl.extras import installed_version
from embodied_rl.files import parse_json
from embodied_rl.models.registry import LANGUAGE_MODELS, MODELS
from embodied_rl.params import argument

CONFIG_FILE: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
_WHOLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_COPY: Final = "copy the folder again"
_TOKENIZER: Final[tuple[str, ...]] = ("tokenizer.json", "tokenizer.model", "vocab.json")
Patterns = tuple[str, ...]
Header = Mapping[str, tuple[str, int]]
"""Tensor -> its type, as in the file (F32, BF16, ...), and how many numbers it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layout of folders."""

    title: str
    models: tuple[str, ...] = ()
    """Names of models for it, the likeliest first; empty: it cannot be used here."""
    files: Mapping[Patterns, str] = field(default_factory=dict)
    """Patterns of which one must match -> what the file is for."""
    wanted: Mapping[Patterns, str] = field(default_factory=dict)
    """The same for what is no must; the text says what happens without."""


_OPENVLA_FILES: Final[Mapping[Patterns, str]] = {
    ("preprocessor_config.json",): "means and deviations of the image encoders",
    ("tokenizer.json",): "the tokenizer",
}
_OPENVLA_OFT_WANTED: Final[Mapping[Patterns, str]] = {
    ("action_head--*_checkpoint.pt",): "no L1 head, so actions are the language model's tokens",
    ("proprio_projector--*_checkpoint.pt",): "no proprio_projector, so the policy does not see the robot's state",
}
_LEROBOT_WANTED: Final[Mapping[Patterns, str]] = {
    ("policy_preprocessor.json",): "no preprocessor, so statistics must be with the weights (lerobot until 0.3)",
    ("policy_postprocessor.json",): "no postprocessor, so statistics must be with the weights (lerobot until 0.3)",
    _TOKENIZER: "no tokenizer: it is loaded from the hub, or from the folder in model.params.tokenizer",
}


def layout_of(folder: Path, config: Mapping[str, Any]) -> Layout | None:
    """The layout of a folder with this ``config.json``; None: an unknown one."""
    if "policy" in config and "spec" in config:
        own = [name for name, target in MODELS.items() if target.endswith(f":{config['policy']}")]
        return Layout(title=f"this project's own, of {config['policy']}", models=tuple(own))
    kind, lerobot = config.get("model_type"), config.get("type")
    if kind == "openvla" and any(folder.glob("*--*_checkpoint.pt")):
        models = ("openvla_oft", "openvla")
        return Layout(title="OpenVLA-OFT", models=models, files=_OPENVLA_FILES, wanted=_OPENVLA_OFT_WANTED)
    if kind == "openvla":
        return Layout(title="OpenVLA", models=("openvla", "openvla_oft"), files=_OPENVLA_FILES)
    if lerobot in ("pi0", "pi05", "smolvla"):
        return Layout(title=f"{lerobot} of lerobot", models=(lerobot,), wanted=_LEROBOT_WANTED)
    if kind == "pi0":
        return Layout(title="π0 of transformers", models=("pi0",), wanted={_TOKENIZER: "no tokenizer"})
    if lerobot is not None:
        return Layout(title=f"{lerobot} of lerobot")
    if any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ()):
        title = "causal language model of Hugging Face"
        return Layout(title=title, models=("causal_lm",), files={_TOKENIZER: "the tokenizer"})
    return None


def weights_findings(folder: Path) -> Iterator[Finding]:
    """Checks of a folder that ``model.path`` may name."""
    try:
        config = read_object(folder / CONFIG_FILE)
    except ProblemError as error:
        yield error.finding
        return
    layout = layout_of(folder, config)
    yield _identity(config, layout)
    checks = [_weights(folder)]
    if layout is not None and layout.models:
        checks += [_files(folder, layout), _statistics(folder, config, layout), _value_head(folder)]
    for check in [*checks, _versions(config), _adapters_beside(folder), _exported(folder)]:
        yield from until_problem(check)
    if layout is not None and layout.models:
        yield _command(folder, config, layout)


def adapter_findings(folder: Path) -> Iterator[Finding]:
    """Checks of a folder that ``model.lora.path`` may name."""
    for check in (_adapters(folder), _value_head(folder), _exported(folder)):
        yield from until_problem(check)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ProblemError: the file is missing, damaged, or holds something else.
    """
    try:
        content = parse_json(path.read_text())
    except FileNotFoundError:
        raise ProblemError("files", f"{path.name} is missing", _COPY) from None
    except (OSError, ValueError) as error:
        raise ProblemError("files", f"{path.name} cannot be read ({error})", _COPY) from error
    if not isinstance(content, dict):
        raise ProblemError("files", f"{path.name} holds no JSON object", _COPY)
    return content


def read_header(path: Path, what: str = "weights", advice: str = _COPY) -> Header:
    """Types and sizes of the tensors of a safetensors file.

    Raises:
        ProblemError: about ``what``: the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), math.prod(part.get_shape())) for name, part in tensors.items()}
    except FileNotFoundError:
        raise ProblemError(what, f"{path.name} is missing", advice) from None
    except (OSError, SafetensorError) as error:
        raise ProblemError(what, f"{path.parent.name}/{path.name} is damaged: {error}", advice) from error


def _adapters(folder: Path) -> Iterator[Finding]:
    config = read_object(folder / ADAPTER_CONFIG)
    kind = config.get("peft_type")
    text = f"rank {config.get('r')}, alpha {config.get('lora_alpha')}, peft_type {kind}"
    yield ok("adapters", text) if kind == "LORA" else problem("adapters", text, "only LORA is read here")
    if (folder / EXPORT_FILE).is_file():
        yield ok("use it with", use_of(folder))
    else:
        base = config.get("base_model_name_or_path") or "<base>"
        arguments = shlex.join([argument("model.path", base), argument("model.lora.path", str(folder))])
        yield ok("use it with", f"model=... {arguments}")
    header = read_header(folder / "adapter_model.safetensors")
    layers = {name.removeprefix("base_model.model.").split(".lora_")[0] for name in header if ".lora_" in name}
    yield ok("layers", f"{len(layers)}: {listed(sorted({name.rsplit('.', 1)[-1] for name in layers}), 10)}")
    yield _amount(header)


def _identity(config: Mapping[str, Any], layout: Layout | None) -> Finding:
    names = [f"{key} {config[key]!r}" for key in ("policy", "type", "model_type", "architectures") if key in config]
    said = f"{CONFIG_FILE} says {', '.join(names) or 'nothing of its model'}"
    if layout is None:
        advice = "a model of your own: model.model_type=module:Class (docs/models.md)"
        return problem("model", f"{said}: no layout that is known here", advice)
    if not layout.models:
        return problem("model", f"{layout.title}: {said}", "there is no such model here; docs/models.md lists those")
    return ok("model", f"{layout.title}: {said}")


def _weights(folder: Path) -> Iterator[Finding]:
    index = folder / _INDEX
    listing: Mapping[str, str] = read_object(index).get("weight_map") or {} if index.is_file() else {}
    names = sorted(set(listing.values())) or [_WHOLE]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        others = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
        advice = f"only safetensors are read, not {listed(sorted(others))}; convert them" if others else _COPY
        yield problem("weights", f"{listed(missing)} is missing", advice)
    tensors: dict[str, tuple[str, int]] = {}
    whole = not missing
    for name in names:
        try:
            tensors |= read_header(folder / name)
        except ProblemError as error:
            whole = False
            if name not in missing:
                yield error.finding
    if not whole:
        return
    if lacking := sorted(listing.keys() - tensors.keys()):
        yield problem("weights", f"{_INDEX} lists {listed(lacking, 3)}, and no file has it", _COPY)
    yield _amount(tensors, f" in {len(names)} files" if len(names) > 1 else "")


def _amount(tensors: Header, where: str = "") -> Finding:
    of_type: Counter[str] = Counter()
    for dtype, elements in tensors.values():
        of_type[dtype] += elements
    types = ", ".join(f"{_count(number)} {name}" for name, number in of_type.most_common())
    return ok("weights", f"{_count(sum(of_type.values()))} parameters in {len(tensors)} tensors{where}: {types}")


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _files(folder: Path, layout: Layout) -> Iterator[Finding]:
    for patterns, purpose in layout.files.items():
        found = _matching(folder, patterns)
        if found:
            yield ok("files", f"{listed(found, 3)}: {purpose}")
        else:
            yield problem("files", f"{' or '.join(patterns)} is missing: {purpose}", _COPY)
    for patterns, without in layout.wanted.items():
        found = _matching(folder, patterns)
        yield ok("files", listed(found, 3)) if found else warning("files", f"{' or '.join(patterns)}: {without}")


def _matching(folder: Path, patterns: Patterns) -> list[str]:
    return sorted(path.name for pattern in patterns for path in folder.glob(pattern))


def _statistics(folder: Path, config: Mapping[str, Any], layout: Layout) -> Iterator[Finding]:
    if "openvla" in layout.models:
        path = folder / "dataset_statistics.json"
        content = read_object(path) if path.is_file() else config.get("norm_stats")
        if content:
            source = path.name if path.is_file() else f"norm_stats of {CONFIG_FILE}"
            yield ok("statistics", f"{source}: {listed(sorted(content))}", "model.params.unnorm_key chooses one")
        else:
            advice = "without them nobody knows what its actions mean; take the fine-tuned checkpoint's file"
            yield problem("statistics", "neither dataset_statistics.json nor norm_stats", advice)
    elif set(layout.models) & {"pi0", "pi05", "smolvla"}:
        yield from _lerobot_statistics(folder)


def _lerobot_statistics(folder: Path) -> Iterator[Finding]:
    paths = [folder / name for name in ("policy_preprocessor.json", "policy_postprocessor.json")]
    steps = [step for path in paths if path.is_file() for step in read_object(path).get("steps") or ()]
    found = {name for step in steps if "state_file" in step for name in read_header(folder / step["state_file"])}
    if found:
        yield ok("statistics", listed(sorted(found), 8))
        return
    whole = folder / _WHOLE
    if old := [name for name in (read_header(whole) if whole.is_file() else ()) if ".buffer_" in name]:
        yield ok("statistics", f"with the weights: {listed(sorted(old), 4)}")
    else:
        advice = (
            "right for a base that is to be fine-tuned with IDENTITY alone; else take the fine-tuned policy's files"
        )
        yield warning("statistics", "none of actions or states", advice)


def _value_head(folder: Path) -> Iterator[Finding]:
    path = folder / "value_head.safetensors"
    if path.is_file():
        read_header(path)
        yield ok("value head", path.name)


def _versions(config: Mapping[str, Any]) -> Iterator[Finding]:
    for key, package in (("transformers_version", "transformers"), ("lerobot_version", "lerobot")):
        if key in config:
            yield ok("written with", f"{package} {config[key]}; here: {installed_version(package) or 'not installed'}")


def _adapters_beside(folder: Path) -> Iterator[Finding]:
    if (folder / ADAPTER_CONFIG).is_file():
        yield warning(
            "adapters", f"{ADAPTER_CONFIG} beside weights", f"model.path leaves them out; model.lora.path={folder}"
        )
    for path in sorted(folder.glob(f"*/{ADAPTER_CONFIG}")):
        config = read_object(path)
        text = f"{path.parent.name}/: rank {config.get('r')}, alpha {config.get('lora_alpha')}"
        advice = "model.path leaves them out: published weights have them merged in; else set model.lora.path"
        yield ok("adapters", text, advice)


def _exported(folder: Path) -> Iterator[Finding]:
    if (folder / EXPORT_FILE).is_file():
        content = read_object(folder / EXPORT_FILE)
        versions = ", ".join(f"{name} {version}" for name, version in (content.get("versions") or {}).items())
        yield ok("exported", f"after {content.get('step')} training steps, with {versions}")


def _command(folder: Path, config: Mapping[str, Any], layout: Layout) -> Finding:
    if (folder / EXPORT_FILE).is_file():
        return ok("use it with", use_of(folder))
    model, *others = layout.models
    task = "task=math " if model in LANGUAGE_MODELS else "env=... "
    text = f"python train.py {task}model={model} {shlex.quote(argument('model.path', str(folder)))}"
    if "spec" in config:
        text += f" model.num_action_chunks={config['spec']['num_action_chunks']}"
    return ok("use it with", text, f"or model={', model='.join(others)}" if others else "")
