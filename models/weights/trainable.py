"""The parameters of a policy that are trained, by patterns of their names (``model.trainable``)."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from embodied_rl.errors import UserError, listed, suggestion
from embodied_rl.models.base import Policy

_SHOWN = 8
"""Names that a message lists."""


def freeze_others(policy: Policy, trainable: Mapping[str, bool]) -> None:
    """Freeze the parameters whose last matching pattern is false. What the model itself does not train stays frozen,
    and the value head is trained always.

    Args:
        trainable: shell patterns of names (:mod:`fnmatch`, where ``*`` also matches dots) -> whether those are trained.

    Raises:
        UserError: a pattern that no name matches, or none is left to be trained.
    """
    of_value_head = {id(parameter) for parameter in policy.value_parameters()}
    parameters = {name: p for name, p in policy.named_parameters() if id(p) not in of_value_head}
    for pattern in trainable:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise UserError(
                f"model.trainable: got {pattern!r}, which is no parameter's name.{suggestion(pattern, parameters)} "
                f"Expected a pattern of {listed(sorted(parameters), _SHOWN)}"
            )
    for name, parameter in parameters.items():
        decided = [trained for pattern, trained in trainable.items() if fnmatchcase(name, pattern)]
        if decided and not decided[-1]:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(
            f"model.trainable: got {dict(trainable)}, which leaves nothing to train; give a pattern that is true, "
            "behind the others: the last that matches counts"
        )
