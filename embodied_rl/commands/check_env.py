"""``python train.py check-env env=...``: whether a simulator adapter keeps the protocol, on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from embodied_rl.command_line import checked
from embodied_rl.commands.env_checks import SLOTS, Subject, check, first_states, raised, state_elsewhere
from embodied_rl.commands.terminal import CommandParser, Finding, console, problem, show
from embodied_rl.envs.base import SimEnv, adapter_class
from embodied_rl.envs.reset_states import task_ranges
from embodied_rl.errors import UserError
from embodied_rl.params import parse_params

USAGE: Final = "python train.py check-env env=<name> [key=value ...] [--steps N] [--resets N] [--picture FILE]"
HELP: Final = """
Builds the env of a command line and plays it with a random agent and one that does nothing. Says whether it keeps what
training takes for granted: shapes and types, the same episode for the same seed, state and actions, groups that start
alike, slots that leave each other alone, a reward level of 0 at the start, no reset or horizon of its own, memory that
does not grow; and how fast it is. A picture shows what its cameras see. Works for an env of your own, too.

  --steps N        steps of each check (40)
  --resets N       resets over which memory is watched (200); 0: none
  --picture FILE   where the picture goes (check_env_<name>.png)
  --traceback      do not catch what the simulator raises

  python train.py check-env env=robosuite_lift
  python train.py check-env --config-dir . env=cart
  python train.py check-env env=dummy env.env_type=my_env.py:MyEnv env.init_params={tolerance:0.2}

The exit status is 1 if there is a problem.
"""

_NEEDED: Final = ("task", "reset", "step", "observe", "close")
"""Methods that no adapter can be without; those that draw nothing have no ``render``."""


def main(arguments: Sequence[str]) -> int:
    """Check the env of a command line; returns the exit status.

    Raises:
        UserError: the configuration is wrong, has no env, or its simulator is not installed.
    """
    parser = CommandParser(USAGE, HELP)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--resets", type=int, default=200)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse(arguments or ["--help"])
    if options.steps < 2 or options.resets < 0:
        raise UserError(f"got --steps {options.steps} --resets {options.resets}, expected at least 2 and 0")
    folder = [] if options.config_dir is None else ["--config-dir", options.config_dir]
    env = getattr(checked([*folder, *options.overrides]), "env", None)
    if env is None:
        raise UserError("check-env: this task has no env; name one: python train.py check-env env=dummy")
    adapter = adapter_class(env.env_type)
    params = parse_params(adapter.Params, env.init_params, "env.init_params")
    picture = options.picture or Path(f"check_env_{env.name}.png")
    title = f"{env.name} ({env.env_type})"
    if missing := [name for name in _NEEDED if not callable(getattr(adapter, name, None))]:
        raise UserError(
            f"env.env_type: {adapter.__name__} has no {', '.join(f'{name}()' for name in missing)}; what each does: "
            "docs/environments.md"
        )
    build: Any = adapter
    try:
        sim: SimEnv = build(SLOTS, params, env.seed)
    except UserError:
        raise
    except Exception as error:
        if options.traceback:
            raise
        return show(console(), title, [raised(error)])
    try:
        subject = Subject(
            sim=sim,
            params=params,
            seed=env.seed,
            horizon=env.train.max_episode_steps,
            relative=env.use_rel_reward,
            steps=options.steps,
            states=(0,),
        )
        findings: list[Finding] = []
        try:
            ranges = task_ranges(sim, env.task_ids)
            subject = replace(subject, states=first_states(ranges), elsewhere=state_elsewhere(ranges))
        except ValueError as error:
            findings.append(problem("tasks", str(error)))
        except Exception as error:
            if options.traceback or isinstance(error, UserError):
                raise
            findings.append(raised(error))
        else:
            findings += check(subject, resets=options.resets, picture=picture, traceback=options.traceback)
        return show(console(), title, findings)
    finally:
        sim.close()
