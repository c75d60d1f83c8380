"""How a folder of weights, or a name on the hub, becomes a network: ``model.hf_overrides``, ``revision``,
``trust_remote_code`` and ``tokenizer_path``. No torch here until a network is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from huggingface_hub.errors import StrictDataclassError

from embodied_rl.errors import UserError, first_line, listed, suggestion

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from embodied_rl.models.base import Policy
    from embodied_rl.schema import ModelConfig

_NOT_OVERRIDDEN: Final[Mapping[str, str]] = {
    "architectures": "it names the network",
    "auto_map": "it names code",
    "dtype": "set model.params.dtype",
    "model_type": "it names the network",
    "transformers_version": "it says who wrote the folder",
}
"""Names of every config that decide what is loaded, not how it computes."""
_ADVICE: Final[Mapping[str, str]] = {
    "hf_overrides": "no config of transformers builds its network; set model.params",
    "revision": "it reads local folders alone; download that revision (hf download NAME --revision ... --local-dir "
    "FOLDER) and set model.path=FOLDER",
    "trust_remote_code": "its code is this project's, and a folder's is never run; leave it out",
    "tokenizer_path": "its tokenizer is that of model.path; pi0, pi05 and smolvla have model.params.tokenizer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """The keys of the section ``key`` that say how ``path`` is loaded."""

    key: str = "model"
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    trust_remote_code: bool = False
    tokenizer_path: str | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        return cls(**{name: getattr(config, name) for name in _ADVICE})

    def given(self) -> list[str]:
        """Names of the keys that are set."""
        return [name for name in _ADVICE if getattr(self, name)]

    def asks_for_dropout(self) -> bool:
        return any("drop" in name for name, _ in _leaves(self.hf_overrides))

    def hub_options(self) -> dict[str, Any]:
        """Options of transformers' ``from_pretrained``. A trust that is false, not missing, is never asked about."""
        return {"trust_remote_code": self.trust_remote_code, **({"revision": self.revision} if self.revision else {})}


AS_IT_IS: Final = Loading()


def check_loading(model: type[Policy], loading: Loading, path: str | None) -> None:
    """Raise UserError unless the model can be loaded so."""
    for name in loading.given():
        if name not in model.loading_keys:
            raise UserError(
                f"{loading.key}.{name}: got {getattr(loading, name)!r}, which {model.__name__} cannot have: "
                f"{_ADVICE[name]}"
            )
    check_revision(loading, path)


def check_revision(loading: Loading, path: str | None) -> None:
    """Raise UserError where there is no name on the hub that the revision could be of."""
    if loading.revision is not None and (path is None or Path(path).exists()):
        what = "is null" if path is None else f"{path} is a local folder, which has no revisions"
        raise UserError(
            f"{loading.key}.revision={loading.revision}: {loading.key}.path {what}; leave the revision out, or give a "
            "name on the hub as path"
        )


def read_config(path: str, loading: Loading) -> PreTrainedConfig:
    """transformers' config of ``path``, before ``hf_overrides``.

    Raises:
        UserError: it can be read by its own code alone, which is not trusted.
        LOADING_ERRORS: there is no such model, or a file is damaged.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, **loading.hub_options())
    except ValueError as error:
        raise untrusted(error, path, loading, "config.json") or error from None


def untrusted(error: Exception, path: str, loading: Loading, file: str) -> UserError | None:
    """The :func:`refusal`, where that is what transformers' error is about."""
    is_of_code = "trust_remote_code" in str(error) and not loading.trust_remote_code
    return refusal(path, loading, file) if is_of_code else None


def refusal(path: str, loading: Loading, file: str) -> UserError:
    """The error that says what code of ``path`` would have to be run."""
    from transformers.utils.hub import cached_file

    key = "tokenizer_path" if file == "tokenizer_config.json" and path == loading.tokenizer_path else "path"
    try:
        found = cached_file(path, file, revision=loading.revision if key == "path" else None)
        named = {} if found is None else _auto_map(Path(found))
    except OSError:
        named = {}
    classes = listed(sorted(f"auto_map.{name}: {value}" for name, value in named.items()), 3) or "auto_map"
    return UserError(
        f"{loading.key}.{key}={path}: its {file} names code of its own ({classes}), which can do whatever you can and "
        f"was not run; read it, and if you trust it set {loading.key}.trust_remote_code=true"
    )


def names_code(folder: Path) -> bool:
    """Whether a local folder's configuration names code of its own."""
    return bool(_auto_map(folder / "config.json"))


def override(config: Any, overrides: Mapping[str, Any], key: str) -> None:
    """Change a config of transformers, or a mapping of names to configs, in place.

    Dictionaries change the names in them alone, be they configs or plain, such as ``rope_parameters``. Where a dropout
    is among the overrides, those that are not become 0: they would be switched off otherwise.

    Raises:
        UserError: a name that the config does not have, or a value of the wrong type.
    """
    if any("drop" in name for name, _ in _leaves(overrides)):
        _without_dropout(config)
    _override(config, overrides, key)


def check_shapes(build: Callable[[Any], nn.Module], before: Any, after: Any, key: str) -> None:
    """Compare the networks of two configs, which are built without memory.

    Raises:
        UserError: the overrides changed a tensor of the weights, or no network can be built with them.
    """
    import torch

    from embodied_rl.models.weights.folder import LOADING_ERRORS, misfits

    def shapes(config: Any) -> dict[str, torch.Size]:
        with torch.device("meta"):
            return {name: parameter.shape for name, parameter in build(config).named_parameters()}

    plain = shapes(before)
    try:
        changed = misfits(plain, shapes(after))
    except LOADING_ERRORS as error:
        raise UserError(f"{key}: no network can be built so: {type(error).__name__}: {first_line(error)}") from error
    if changed:
        raise UserError(
            f"{key}: would change the weights' tensors: {listed(changed, 3, '; ')}; overrides change how a network "
            "computes with the weights it has, so leave out those that change its sizes"
        )


def merged(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides one after the other."""
    both = [name for name in then if isinstance(then[name], Mapping) and isinstance(first.get(name), Mapping)]
    return {**first, **then, **{name: merged(first[name], then[name]) for name in both}}


def _override(config: Any, overrides: Mapping[str, Any], key: str) -> None:
    known = _names(config)
    for name, value in overrides.items():
        where = f"{key}.{name}"
        if name in _NOT_OVERRIDDEN and not isinstance(config, Mapping):
            raise UserError(f"{where}: cannot be overridden: {_NOT_OVERRIDDEN[name]}; leave it out")
        if name not in known:
            from transformers import PreTrainedConfig

            # Every config has those of the base class, which decide nothing here.
            of_it = listed(sorted(known - set(PreTrainedConfig().to_dict())), 60)
            raise UserError(f"{where}: no name of this config.{suggestion(name, known)} It has {of_it}")
        # transformers 5 calls them rope_parameters, and their type rope_type.
        name = "rope_parameters" if name == "rope_scaling" and "rope_parameters" in known else name
        old = config[name] if isinstance(config, Mapping) else getattr(config, name)
        if hasattr(old, "to_dict"):
            if not isinstance(value, Mapping):
                raise UserError(f"{where}: got {value!r}, expected names of {type(old).__name__} and their values")
            _override(old, value, where)
            continue
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = {**old, **({"rope_type": value["type"]} if "type" in value else {}), **value}
        try:
            setattr(config, name, value)
        except (StrictDataclassError, TypeError, ValueError) as error:
            raise UserError(f"{where}: got {value!r}: {_reason(error)}") from error


def _names(config: Any) -> set[str]:
    if isinstance(config, Mapping):
        return set(config)
    names = {name for name in config.to_dict() if not name.startswith("_")} | set(config.attribute_map)
    return names | ({"rope_scaling"} if "rope_parameters" in names else set())


def _without_dropout(config: Any) -> None:
    for name in _names(config):
        value = config[name] if isinstance(config, Mapping) else getattr(config, name, None)
        if hasattr(value, "to_dict"):
            _without_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def _leaves(overrides: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in overrides.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield name, value


def _reason(error: Exception) -> str:
    """The last line of a strict dataclass's error says what was expected."""
    return str(error).strip().splitlines()[-1].strip()


def _auto_map(file: Path) -> Mapping[str, Any]:
    from embodied_rl.models.weights.look import read_json

    try:
        found = read_json(file).get("auto_map")
    except UserError:
        return {}
    return found if isinstance(found, Mapping) else {}
