"""The tasks by name, ``runner.task_type``. A new task is a folder and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from embodied_rl.tasks.collect import rules as collect
from embodied_rl.tasks.dagger import rules as dagger
from embodied_rl.tasks.embodied import rules as embodied
from embodied_rl.tasks.embodied_sft import rules as embodied_sft
from embodied_rl.tasks.math import rules as math
from embodied_rl.tasks.task import Task

TASKS: Final[Mapping[str, Task]] = {
    "collect": collect.TASK,
    "embodied": embodied.TASK,
    "math": math.TASK,
    "sft": math.SFT_TASK,
    "embodied_sft": embodied_sft.TASK,
    "dagger": dagger.TASK,
}
