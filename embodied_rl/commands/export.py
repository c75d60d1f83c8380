"""``python train.py export <checkpoint> <folder>``: a checkpoint's policy as a folder, for ``model.path`` and others.

The policy is built from what the checkpoint says of it (``policy.json``), in this process and without a simulator,
however many ranks wrote the shards.
"""

from __future__ import annotations

import json
import shlex
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import rich

from embodied_rl.checkpoints.store import read_state, resolve, verify
from embodied_rl.commands.terminal import CommandParser, new_folder, refuse_existing
from embodied_rl.errors import CheckpointError, UserError, listed
from embodied_rl.evaluation import views
from embodied_rl.files import parse_json
from embodied_rl.models.registry import LANGUAGE_MODELS, MODELS
from embodied_rl.models.weights.loading import Loading
from embodied_rl.params import argument, flat

if TYPE_CHECKING:
    from embodied_rl.checkpoints.policy_record import PolicyRecord
    from embodied_rl.models.base import Policy

USAGE: Final = "python train.py export <checkpoint or run directory> <folder> [adapters=merged|only] [options]"
HELP: Final = """
Writes a folder that model.path=<folder> loads: weights as safetensors, with what is needed to use them.
A run directory means its newest checkpoint.

  adapters=merged   (default) LoRA adapters are added to the weights under them
  adapters=only     LoRA adapters alone, in peft's format, for model.lora.path=<folder> or peft itself
  base=<folder>     where the folder is now that model.path named in the run
  trust_remote_code=true   run the code that a language model's folder brings, as the run did
"""
EXPORT_FILE: Final = "export.json"


def main(arguments: Sequence[str]) -> None:
    """Export as the arguments say, and print how to use the result.

    Raises:
        UserError: of :func:`export`, or wrong arguments.
    """
    parser = CommandParser(
        USAGE, HELP, settings={"adapters": ("merged", "only"), "base": None, "trust_remote_code": ("false", "true")}
    )
    parser.add_argument("source", type=Path, metavar="<checkpoint or run directory>")
    parser.add_argument("output", type=Path, metavar="<folder>")
    given = parser.parse(arguments or ["--help"])
    checkpoint = export(
        given.source,
        given.output,
        adapters_only=given.adapters == "only",
        base=given.base,
        trust_remote_code=given.trust_remote_code == "true",
    )
    console = rich.get_console()
    console.print(f"exported: {checkpoint}", highlight=False, soft_wrap=True)
    console.print(f"use it with: {use_of(given.output)}", highlight=False, soft_wrap=True, markup=False)


def export(
    source: Path,
    output: Path,
    *,
    adapters_only: bool = False,
    base: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write the policy of a checkpoint into a new folder.

    Args:
        source: a checkpoint, or a run directory, which means its newest.
        output: must not exist, or be empty.
        adapters_only: leave out the weights under the adapters; else adapters are merged into them.
        base: used instead of the ``model.path`` of the run.
        trust_remote_code: as ``model.trust_remote_code``.

    Returns:
        The checkpoint.

    Raises:
        UserError: there is no checkpoint, or none that this works for, or the output cannot be written.
    """
    refuse_existing(output)  # before the work
    checkpoint = resolve(str(source), source, key="checkpoint")
    if checkpoint is None:
        raise CheckpointError(f"checkpoint={source}: holds no whole checkpoint")
    verify(checkpoint)
    from embodied_rl.checkpoints.policy_record import (
        PolicyRecord,  # imports torch, so only for a checkpoint that is there
    )

    record = PolicyRecord.read(checkpoint)
    if base is not None:
        local = Path(base).is_dir()
        record = replace(record, model=replace(record.model, path=base, **({"revision": None} if local else {})))
    record = replace(record, model=replace(record.model, trust_remote_code=trust_remote_code))
    if adapters_only:
        _check_adapters(record, checkpoint)
    policy = _rebuild(record, checkpoint, unchanged_base=adapters_only)
    with new_folder(output) as scratch:
        if adapters_only:
            from embodied_rl.models.weights.lora import save_adapters

            assert record.model.path is not None
            save_adapters(policy, record.model.lora, record.model.path, scratch)
        else:
            policy.save_pretrained(scratch)
        if (checkpoint / views.FILE).is_file():
            shutil.copyfile(checkpoint / views.FILE, scratch / views.FILE)
        base = record.model.path if adapters_only else None
        describe(scratch, record, base=base, step=read_state(checkpoint).step)
    return checkpoint


def describe(folder: Path, record: PolicyRecord, *, base: str | None, step: int) -> None:
    """Write down what the weights in an exported folder are of."""
    content = {
        "model_type": record.model.model_type,
        "params": record.model.params,
        "num_action_chunks": record.spec.num_action_chunks,
        "record": asdict(record),
        "base": base,
        "step": step,
        "versions": record.versions,
    }
    (folder / EXPORT_FILE).write_text(json.dumps(content, indent=2) + "\n")


def use_of(folder: Path) -> str:
    """The arguments with which a run loads an exported folder."""
    content: Mapping[str, Any] = parse_json((folder / EXPORT_FILE).read_text())
    name, base = content["model_type"], content["base"]
    words = [f"model={name}" if name in MODELS else f"model.model_type={name}"]
    paths = {"path": str(folder)} if base is None else {"path": base, "lora.path": str(folder)}
    words += [argument(f"model.{key}", path) for key, path in paths.items()]
    if name not in LANGUAGE_MODELS:
        words.append(f"model.num_action_chunks={content['num_action_chunks']}")
    # An architecture is of a fresh model; the folder has its own.
    params = {key: value for key, value in content["params"].items() if (name, key) != ("causal_lm", "architecture")}
    words += [argument(f"model.params.{key}", value) for key, value in params.items()]
    model = content.get("record", {}).get("model", {})
    if base is not None:  # else the folder holds them
        words += [argument(f"model.{key}", model[key]) for key in ("revision", "tokenizer_path") if model.get(key)]
        words += [argument(f"model.{key}", value) for key, value in flat(model.get("hf_overrides", {}), "hf_overrides")]
    if model.get("trust_remote_code"):
        words.append("model.trust_remote_code=true")
    return shlex.join(words)


def exported_policy(folder: Path) -> Policy:
    """The policy of an exported folder.

    Raises:
        UserError: the folder is of a language model, is damaged, or was exported before it said what the policy's
            inputs are.
    """
    from pydantic import TypeAdapter

    from embodied_rl.checkpoints.policy_record import PolicyRecord
    from embodied_rl.models.registry import build_policy

    try:
        content = parse_json((folder / EXPORT_FILE).read_bytes())
        base, record = content["base"], TypeAdapter(PolicyRecord).validate_json(json.dumps(content["record"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / EXPORT_FILE}: does not say which policy this is ({type(error).__name__}: {error}); "
            "export it again from its checkpoint"
        ) from error
    model = record.model
    refuse_language(model.model_type, folder)
    loading = Loading() if base is None else Loading.of(model)  # the folder holds the overrides
    policy = build_policy(model.model_type, record.spec, model.params, base or str(folder), loading)
    if base is not None:
        from embodied_rl.models.weights.lora import add_adapters

        add_adapters(policy, replace(model.lora, path=str(folder)))
    return policy


def refuse_language(model_type: str, what: Path) -> None:
    """Raise UserError for a language model, which takes no actions."""
    if model_type in LANGUAGE_MODELS:
        raise UserError(f"{what}: is of a language model, which takes no actions; use it with transformers, exported")


def _check_adapters(record: PolicyRecord, checkpoint: Path) -> None:
    if not record.model.lora.used:
        raise UserError(f"adapters=only: {checkpoint} is of a policy without adapters (LoRA); leave it out")
    if record.model.path is None:
        raise UserError(
            f"adapters=only: the weights under the adapters of {checkpoint} are in no folder (its run had no "
            "model.path), so nobody could use the adapters alone; use adapters=merged"
        )


def _rebuild(record: PolicyRecord, checkpoint: Path, *, unchanged_base: bool) -> Policy:
    """The policy with the checkpoint's weights, adapters merged unless ``unchanged_base``, which is then checked."""
    from embodied_rl.checkpoints.shards import load_weights
    from embodied_rl.models.registry import policy_of

    lora = record.model.lora
    if lora.used:
        lora = replace(lora, init_lora_weights="default")  # others would change the base, for nothing
    policy = policy_of(replace(record.model, lora=lora), record.spec)
    before = _sums(policy) if unchanged_base else {}
    load_weights(policy, checkpoint)
    if not lora.used:
        return policy
    from embodied_rl.models.weights.lora import merge_adapters

    if unchanged_base:
        after = _sums(policy)
        changed = sorted(name for name in after if after[name] != before[name])
        if changed:
            raise UserError(
                f"adapters=only: the weights under the adapters of {checkpoint} are not those of "
                f"{record.model.path}: {listed(changed, 3)}; use adapters=merged"
            )
    else:
        merge_adapters(policy)
    return policy


def _sums(policy: Policy) -> dict[str, int]:
    """CRC-32 of every tensor that adapters leave alone."""
    import torch

    from embodied_rl.models.weights.lora import base_tensors

    return {
        name: zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        for name, tensor in base_tensors(policy)
    }
