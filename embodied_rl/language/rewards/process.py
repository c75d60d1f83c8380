"""A process that scores completions, one at a time, until its pipe is closed. It imports nothing heavy by itself."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Final, Literal, TypeAlias

from embodied_rl.errors import UserError
from embodied_rl.language.rewards.functions import Part, weighted
from embodied_rl.runtime import signals

Texts: TypeAlias = dict[str, str]
"""The keyword arguments of a reward function."""
Message: TypeAlias = (
    tuple[Literal["ready"], None] | tuple[Literal["score"], float | None] | tuple[Literal["user", "raised"], str]
)
"""What the process says; of failures the message or the traceback."""
EXAMPLE: Final[Texts] = {"prompt": "1+1=", "completion": r"\boxed{2}", "answer": "2", "metadata": ""}
"""For the first call, which imports and compiles what later ones do not."""


def main(parts: Sequence[Part], pipe: Connection, parent: int) -> None:
    """Build the reward, call it once, say so, then answer each :data:`Texts` with a :data:`Message`."""
    signals.die_with_parent(parent)
    signals.show_as("reward")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals.unblock()
    faulthandler.enable()
    try:
        reward = weighted(parts)
        with contextlib.suppress(Exception):  # it may not like the example
            reward(**EXAMPLE)
        pipe.send(("ready", None))
        while True:
            try:
                texts: Texts = pipe.recv()
            except EOFError:
                return
            pipe.send(("score", reward(**texts)))
    except UserError as error:
        _report(pipe, ("user", str(error)))
    except BaseException as error:  # an exit() in a function is a failure, too
        _report(pipe, ("raised", "".join(traceback.format_exception(error))))
    finally:
        signals.leave()  # what a function has started, or left to do at exit, must not keep the process


def _report(pipe: Connection, message: Message) -> None:
    with contextlib.suppress(OSError):
        pipe.send(message)
