"""Rules of ``task=sft``: those of ``task=math``, which tell the two apart."""

from __future__ import annotations

from dataclasses import replace

from embodied_rl.schema import SftConfig
from embodied_rl.tasks.math import rules as math

TASK = replace(math.TASK, config=SftConfig, wiring="embodied_rl.tasks.sft.run:SftWiring", imitates=True)
