"""``doctor`` on a folder of weights or of adapters: nothing is loaded, only headers and small files are read."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from embodied_rl.commands.export import EXPORT_FILE, use_of
from embodied_rl.commands.families import Family, family_of
from embodied_rl.commands.findings import Finding, ok, problem, warning
from embodied_rl.commands.safetensors_header import DamagedError, TensorInfo, read_header
from embodied_rl.errors import listed
from embodied_rl.extras import installed_version
from embodied_rl.models.registry import LANGUAGE_MODELS

CONFIG_FILE: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
_WHOLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_ADAPTERS: Final = "adapter_model.safetensors"
_COPY: Final = "copy the folder again"


def weights_findings(folder: Path) -> Iterator[Finding]:
    """Checks of a folder that ``model.path`` may name."""
    config = _json(folder / CONFIG_FILE)
    if isinstance(config, Finding):
        yield config
        return
    family = family_of(folder, config)
    yield _identity(config, family)
    yield from _weights(folder)
    if family is not None and family.models:
        yield from _files(folder, family)
        yield from _statistics(folder, config, family)
        yield from _value_head(folder)
    yield from _versions(config)
    yield from _adapters_beside(folder)
    yield from _exported(folder)
    if family is not None and family.models:
        yield _command(folder, config, family)


def adapter_findings(folder: Path) -> Iterator[Finding]:
    """Checks of a folder that ``model.lora.path`` may name."""
    config = _json(folder / ADAPTER_CONFIG)
    if isinstance(config, Finding):
        yield config
        return
    kind = config.get("peft_type")
    text = f"rank {config.get('r')}, alpha {config.get('lora_alpha')}, peft_type {kind}"
    yield ok("adapters", text) if kind == "LORA" else problem("adapters", text, "only LORA is read here")
    header = _header(folder / _ADAPTERS)
    if isinstance(header, Finding):
        yield header
    else:
        layers = {name.removeprefix("base_model.model.").split(".lora_")[0] for name in header if ".lora_" in name}
        yield ok("layers", f"{len(layers)}: {listed(sorted({name.rsplit('.', 1)[-1] for name in layers}), 10)}")
        yield _amount(header)
    yield from _value_head(folder)
    yield from _exported(folder)
    base = config.get("base_model_name_or_path") or "<base>"
    if (folder / EXPORT_FILE).is_file():
        yield ok("use it with", use_of(folder))
    else:
        yield ok(
            "use it with", f"model=... {shlex.quote(f'model.path={base}')} {shlex.quote(f'model.lora.path={folder}')}"
        )


def _identity(config: Mapping[str, Any], family: Family | None) -> Finding:
    names = [f"{key} {config[key]!r}" for key in ("policy", "type", "model_type", "architectures") if key in config]
    said = f"{CONFIG_FILE} says {', '.join(names) or 'nothing of its model'}"
    if family is None:
        advice = "a model of your own: model.model_type=module:Class (docs/models.md)"
        return problem("model", f"{said}: no layout that is known here", advice)
    if not family.models:
        return problem("model", f"{family.title}: {said}", "there is no such model here; docs/models.md lists those")
    return ok("model", f"{family.title}: {said}")


def _weights(folder: Path) -> Iterator[Finding]:
    names = [_WHOLE]
    listing: Mapping[str, str] = {}
    if (folder / _INDEX).is_file():
        index = _json(folder / _INDEX)
        if isinstance(index, Finding):
            yield index
            return
        listing = index.get("weight_map") or {}
        names = sorted(set(listing.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        others = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
        advice = f"only safetensors are read, not {listed(sorted(others))}; convert them" if others else _COPY
        yield problem("weights", f"{listed(missing)} is missing", advice)
    tensors: dict[str, TensorInfo] = {}
    damaged = False
    for name in names:
        if name in missing:
            continue
        header = _header(folder / name)
        if isinstance(header, Finding):
            damaged = True
            yield header
        else:
            tensors |= header
    if missing or damaged:
        return
    if lacking := sorted(listing.keys() - tensors.keys()):
        yield problem("weights", f"{_INDEX} lists {listed(lacking, 3)}, and no file has it", _COPY)
    yield _amount(tensors, f" in {len(names)} files" if len(names) > 1 else "")


def _amount(tensors: Mapping[str, TensorInfo], where: str = "") -> Finding:
    of_type: Counter[str] = Counter()
    for tensor in tensors.values():
        of_type[tensor.dtype] += tensor.elements
    types = ", ".join(f"{_count(number)} {name}" for name, number in of_type.most_common())
    return ok("weights", f"{_count(sum(of_type.values()))} parameters in {len(tensors)} tensors{where}: {types}")


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _files(folder: Path, family: Family) -> Iterator[Finding]:
    for patterns, purpose in family.files.items():
        found = _matching(folder, patterns)
        if found:
            yield ok("files", f"{listed(found, 3)}: {purpose}")
        else:
            yield problem("files", f"{' or '.join(patterns)} is missing: {purpose}", _COPY)
    for patterns, without in family.wanted.items():
        found = _matching(folder, patterns)
        yield ok("files", listed(found, 3)) if found else warning("files", f"{' or '.join(patterns)}: {without}")


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    return sorted(path.name for pattern in patterns for path in folder.glob(pattern))


def _statistics(folder: Path, config: Mapping[str, Any], family: Family) -> Iterator[Finding]:
    if "openvla" in family.models:
        path = folder / "dataset_statistics.json"
        content = _json(path) if path.is_file() else config.get("norm_stats") or {}
        if isinstance(content, Finding):
            yield content
        elif content:
            source = path.name if path.is_file() else f"norm_stats of {CONFIG_FILE}"
            yield ok("statistics", f"{source}: {listed(sorted(content))}", "model.params.unnorm_key chooses one")
        else:
            advice = "without them nobody knows what its actions mean; take the fine-tuned checkpoint's file"
            yield problem("statistics", "neither dataset_statistics.json nor norm_stats", advice)
    elif set(family.models) & {"pi0", "smolvla"}:
        yield from _lerobot_statistics(folder)


def _lerobot_statistics(folder: Path) -> Iterator[Finding]:
    found: set[str] = set()
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        content = _json(folder / name) if (folder / name).is_file() else {}
        if isinstance(content, Finding):
            yield content
            continue
        for step in content.get("steps") or ():
            if "state_file" in step:
                header = _header(folder / step["state_file"])
                if isinstance(header, Finding):
                    yield header
                else:
                    found |= set(header)
    if found:
        yield ok("statistics", listed(sorted(found), 8))
        return
    weights = _header(folder / _WHOLE)
    old = [] if isinstance(weights, Finding) else [name for name in weights if ".buffer_" in name]
    if old:
        yield ok("statistics", f"with the weights: {listed(sorted(old), 4)}")
    else:
        advice = (
            "right for a base that is to be fine-tuned with IDENTITY alone; else take the fine-tuned policy's files"
        )
        yield warning("statistics", "none of actions or states", advice)


def _value_head(folder: Path) -> Iterator[Finding]:
    path = folder / "value_head.safetensors"
    if path.is_file():
        header = _header(path)
        yield header if isinstance(header, Finding) else ok("value head", path.name)


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
        config = _json(path)
        if isinstance(config, Finding):
            yield config
        else:
            text = f"{path.parent.name}/: rank {config.get('r')}, alpha {config.get('lora_alpha')}"
            advice = "model.path leaves them out: published weights have them merged in; else set model.lora.path"
            yield ok("adapters", text, advice)


def _exported(folder: Path) -> Iterator[Finding]:
    if (folder / EXPORT_FILE).is_file():
        content = _json(folder / EXPORT_FILE)
        if isinstance(content, Finding):
            yield content
        else:
            versions = ", ".join(f"{name} {version}" for name, version in (content.get("versions") or {}).items())
            yield ok("exported", f"after {content.get('step')} training steps, with {versions}")


def _command(folder: Path, config: Mapping[str, Any], family: Family) -> Finding:
    if (folder / EXPORT_FILE).is_file():
        return ok("use it with", use_of(folder))
    model, *others = family.models
    task = "task=math " if model in LANGUAGE_MODELS else "env=... "
    text = f"python train.py {task}model={model} {shlex.quote(f'model.path={folder}')}"
    if "spec" in config:
        text += f" model.num_action_chunks={config['spec']['num_action_chunks']}"
    return ok("use it with", text, f"or model={', model='.join(others)}" if others else "")


def _json(path: Path) -> dict[str, Any] | Finding:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return problem("files", f"{path.name} is missing", _COPY)
    except (OSError, ValueError) as error:
        return problem("files", f"{path.name} cannot be read ({error})", _COPY)
    return content if isinstance(content, dict) else problem("files", f"{path.name} holds no JSON object", _COPY)


def _header(path: Path) -> Mapping[str, TensorInfo] | Finding:
    try:
        return read_header(path)
    except FileNotFoundError:
        return problem("weights", f"{path.name} is missing", _COPY)
    except (OSError, DamagedError) as error:
        return problem("weights", f"{path.name} is damaged: {error}", _COPY)
