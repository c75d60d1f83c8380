"""Folders of weights in the project's own layout, for models that have no published one.

``config.json`` says which policy the weights are of, and with which parameters and spaces; ``model.safetensors`` holds
them. Also what other layouts share: reading all weights of a folder, whole or in shards, by safetensors or
transformers, and refusing those that do not fit.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embodied_rl.errors import UserError, listed
from embodied_rl.files import with_usual_mode, write_json
from embodied_rl.models.weights.loading import AS_IT_IS, Loading, untrusted
from embodied_rl.models.weights.look import CONFIG_FILE, contents, read_json
from embodied_rl.params import NOT_OF_WEIGHTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
VALUE_HEAD_FILE, NOISE_HEAD_FILE = "value_head.safetensors", "noise_head.safetensors"
"""Beside published layouts, which have no such heads."""
LOADING_ERRORS: Final = (
    OSError,
    ValueError,
    SafetensorError,
    StrictDataclassError,
    *(LookupError, TypeError, AttributeError, ArithmeticError, RecursionError),  # of a config.json of any content
)
"""Errors of :func:`load_model` where there is no such model, or a file is damaged."""
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_VALUE_HEAD = "value_head."
_LARGE = 2**22
"""Bytes: smaller files are read as fast as their headers."""
_headers_only: ContextVar[bool] = ContextVar("headers_only", default=False)
_SHOWN = 5
"""Differing tensors that a message lists."""


def write(policy: nn.Module, params: Any, spec: Any, directory: Path) -> None:
    """Write ``policy``, built from the dataclasses ``params`` and ``spec``, into ``directory``, which is made."""
    config = {"policy": type(policy).__name__, "params": asdict(params), "spec": asdict(spec)}
    write_json(directory / CONFIG_FILE, config)
    write_tensors(directory / WEIGHTS_FILE, policy.state_dict())


def read(policy: nn.Module, params: Any, directory: Path) -> None:
    """Give ``policy`` the weights that :func:`write` wrote. A value head may be missing as a whole (it then is fresh),
    or too many.

    Raises:
        UserError: not such a folder, or one of another policy.
    """
    config = read_json(directory / CONFIG_FILE)
    stored = config.get("params")
    theirs = {
        "policy": config.get("policy"),
        "params": shaping(params, stored) if isinstance(stored, dict) else stored,
    }
    ours = {"policy": type(policy).__name__, "params": shaping(params, json.loads(json.dumps(asdict(params))))}
    for key, value in ours.items():
        if theirs[key] != value:
            raise UserError(
                f"model.path={directory}: its {CONFIG_FILE} says {key} {theirs[key]}, and this run has {value}; "
                "choose the model and model.params that the weights were made with"
            )
    own, weights = policy.state_dict(), read_weights(directory)
    if not all(any(name.startswith(_VALUE_HEAD) for name in names) for names in (own, weights)):
        own, weights = _without_value_head(own), _without_value_head(weights)
    check_fit(own, weights, f"model.path={directory}")
    policy.load_state_dict(weights, strict=False)


def shaping(params: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Of the values of a ``Params`` dataclass those that weights depend on. One that is missing, since the folder is
    older than the option, has its default."""
    defaults = {field.name: field.default for field in fields(params) if field.default is not MISSING}
    free = {field.name for field in fields(params) if field.metadata.items() >= NOT_OF_WEIGHTS.items()}
    return {key: value for key, value in {**defaults, **values}.items() if key not in free}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file; tensors that share memory are written each. Its mode obeys the umask."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with with_usual_mode(path):
        save_file(plain, path, metadata={"format": "pt"})  # transformers 4, as OpenVLA pins it, reads no other


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a folder: of ``model.safetensors``, or of the shards that its index names.

    Raises:
        UserError: neither is there, or a file is damaged.
    """
    tensors: dict[str, Tensor] = {}
    for name in weight_files(directory):
        tensors |= read_tensors(directory / name)
    return tensors


def weight_files(directory: Path, *, key: str = "model.path") -> list[str]:
    """Names of the files that hold a folder's weights; ``key`` is the config's that named it.

    Raises:
        UserError: the index of shards is damaged.
    """
    index = directory / INDEX_FILE
    if not index.exists():
        return [WEIGHTS_FILE]
    weight_map = read_json(index, key=key).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{key}: {index} has no weight_map, which says where each tensor is; copy it again")
    return sorted(set(weight_map.values()))


def read_tensors(path: Path, *, key: str = "model.path") -> dict[str, Tensor]:
    """One safetensors file; ``key`` is the config's that named its folder.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        if _headers_only.get() and path.stat().st_size > _LARGE:
            with safe_open(path, framework="numpy") as file:  # torch would map the whole file
                shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"{key}: {path} does not exist; {contents(path.parent)}") from None
    except SafetensorError as error:
        raise UserError(f"{key}: {path} is damaged ({error}); copy it again") from error


@contextlib.contextmanager
def headers_only() -> Iterator[None]:
    """Within, :func:`read_tensors` gives the tensors of large files without their numbers, on the device ``meta``."""
    token = _headers_only.set(True)
    try:
        with warnings.catch_warnings():  # those of small files have theirs, which a policy without any does not take
            warnings.filterwarnings("ignore", "(?s).*copying from a non-meta parameter")
            yield
    finally:
        _headers_only.reset(token)


def load_head(head: nn.Module, path: Path) -> None:
    """Give a head the weights of its own file; without that file it stays fresh.

    Raises:
        UserError: they are damaged, or not exactly the head's.
    """
    if path.exists():
        weights = read_tensors(path)
        check_fit(head.state_dict(), weights, f"model.path: {path}")
        head.load_state_dict(weights)


def load_model(
    auto_class: Any,
    path: str,
    *,
    loading: Loading = AS_IT_IS,
    expected: str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load a model of transformers whose weights are exactly those of ``path``, from a folder that cannot run code
    unless ``loading`` trusts it.

    transformers itself fills what is missing with random numbers, opens pickles, and asks on the console whether to run
    a folder's code.

    A tensor that is tied to another (an output head to the embeddings, by ``tie_word_embeddings``) may be missing, or
    equal to it.

    Args:
        auto_class: one of transformers' ``AutoModelFor...``.
        path: a folder, or a name on the hub.
        loading: what the configuration says of the path.
        expected: what its weights should be of, for the message.
        options: of ``from_pretrained``.

    Raises:
        UserError: a tensor is missing or too many, or has another shape, the index of shards is damaged, the weights
            are pickles, or there is code that is not trusted.
        LOADING_ERRORS: there is no such model, or a file is damaged (OSError, ValueError, SafetensorError, ...).
    """
    key = f"{loading.key}.path"
    refuse_pickled_weights(Path(path), key=key)
    weight_files(Path(path), key=key)
    safe = {"use_safetensors": True, **loading.hub_options()}
    # torch remembers from the first tensor within a `torch.device` on which functions make tensors. transformers has
    # another torch.linspace while it loads; if that came first, linspace would be on the CPU within any later one.
    with torch.device("meta"):
        torch.empty(0)
    try:
        # With ignore_mismatched_sizes shapes are reported like the rest; without, they are an error that names none.
        model, report = auto_class.from_pretrained(
            path, output_loading_info=True, ignore_mismatched_sizes=True, **safe, **options
        )
    except ValueError as error:
        raise untrusted(error, path, loading, CONFIG_FILE) or error from None
    mismatched = sorted(report["mismatched_keys"])
    wanted = dict.fromkeys(sorted(report["missing_keys"]), ()) | {name: shape for name, _, shape in mismatched}
    given = dict.fromkeys(sorted(report["unexpected_keys"]), ()) | {name: shape for name, shape, _ in mismatched}
    problems = [*misfits(wanted, given), *map(str, report["error_msgs"])]
    if not problems:
        problems = [
            f"{name} differs from {other}, to which config.json ties it"
            for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items()
            if model.get_parameter(name) is not model.get_parameter(other)
        ]
    refuse_misfit(problems, f"{key}={path}" if expected is None else f"{key}={path}: no {expected}")
    broken = [name for name, weight in model.named_parameters() if not weight.is_meta and weight.isnan().any()]
    if broken:
        raise UserError(f"{key}={path}: NaN in {listed(broken, _SHOWN)}; copy the weights again")
    return model


def refuse_pickled_weights(folder: Path, *, key: str = "model.path") -> None:
    """See that a folder's weights are safetensors; a name on the hub is left to transformers.

    Raises:
        UserError: they are pickles, which are not opened.
    """
    if (folder / WEIGHTS_FILE).exists() or (folder / INDEX_FILE).exists():
        return
    if pickled := sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern)):
        raise UserError(
            f"{key}={folder}: has no {WEIGHTS_FILE}, only {', '.join(pickled[:3])}: reading a pickle can run code, so "
            "it was not opened; use the weights as safetensors, or convert them where you trust the file "
            "(torch.load(..., weights_only=True), then safetensors.torch.save_file)"
        )


def check_fit(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights that are not exactly the expected ones.

    Args:
        where: the folder or file and the configuration's key of it, for the message.

    Raises:
        UserError: tensors are missing or too many, or have another shape.
    """
    refuse_misfit(
        misfits(
            {name: tensor.shape for name, tensor in expected.items()},
            {name: tensor.shape for name, tensor in found.items()},
        ),
        where,
    )


def misfits(expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]) -> list[str]:
    """Differences of tensors' shapes from the expected ones, a line each."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in expected]
    problems += [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    return problems


def refuse_misfit(problems: Sequence[str], where: str) -> None:
    """Raises UserError: there are problems."""
    if problems:
        raise UserError(f"{where}: the weights do not fit the model: {listed(problems, _SHOWN, '; ')}")


def _without_value_head(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if not name.startswith(_VALUE_HEAD)}
