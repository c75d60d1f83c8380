"""Subcommands other than training: ``python train.py <command> ...``. Each is imported when it is used."""

from __future__ import annotations

from typing import Final

COMMANDS: Final[dict[str, str]] = {
    "check-env": "embodied_rl.commands.check_env:main",
    "compare": "embodied_rl.commands.compare:main",
    "doctor": "embodied_rl.commands.doctor:main",
    "explain": "embodied_rl.explain.show:main",
    "export": "embodied_rl.commands.export:main",
    "make-tiny": "embodied_rl.commands.make_tiny:main",
    "plan": "embodied_rl.commands.plan:main",
    "probe": "embodied_rl.commands.probe:main",
    "report": "embodied_rl.commands.report:main",
    "status": "embodied_rl.commands.status:main",
}
"""First argument -> "module:function", which takes the arguments after it. It may return an exit status."""
