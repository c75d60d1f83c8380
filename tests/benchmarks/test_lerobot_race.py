"""The race with lerobot's evaluation: the script that both sides play, and what is made of its numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import lerobot_race
from benchmarks.lerobot_eval import CHUNK, ENVS, PIXELS, SUITE, TASK, Script
from benchmarks.lerobot_race import EPISODES, THEIRS, Found, apart, compared, overrides, show
from benchmarks.scripted_policy import Scripted, ScriptedParams
from embodied_rl.cli import config_of
from embodied_rl.contracts import EnvObs
from embodied_rl.models.base import PolicySpec
from embodied_rl.schema import EmbodiedConfig

STEPS = 2 * CHUNK
ROOT = Path(lerobot_race.__file__).parents[1]
OF_A_CHILD = """
import subprocess, sys, time
from benchmarks.lerobot_eval import cpu_seconds
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
others = cpu_seconds() - time.process_time()
while cpu_seconds() - time.process_time() < others + 0.2:
    time.sleep(0.01)
child.kill()
"""
"""Ends once another process of its session is seen to have worked."""


def played(play: Callable[[Tensor], Tensor], chunk: int) -> Tensor:
    """[STEPS*2,7]: all actions of an env; its state is the number of the step."""
    return torch.cat([play(torch.full((ENVS, 8), float(step)))[0] for step in range(0, 2 * STEPS, chunk)])


def found(rate: float, *hands: float) -> Found:
    return Found(steps_per_second=rate, steps_per_cpu_second=rate / 2, states=[[hand] * 8 for hand in hands])


@pytest.mark.parametrize("chunk", [1, CHUNK])
def test_a_script_is_the_same_whatever_is_played_at_once(tmp_path: Path, chunk: int) -> None:
    file = tmp_path / "found.json"
    script = Script(file, EPISODES, STEPS, chunk)
    actions = played(script.next, chunk)
    torch.testing.assert_close(actions, played(Script(tmp_path / "other.json", EPISODES, STEPS, CHUNK).next, CHUNK))
    torch.testing.assert_close(actions[:STEPS], actions[STEPS:])
    answer = Found(**json.loads(file.read_text()))
    assert answer.states == [[float(CHUNK)] * 8] * ENVS + [[float(STEPS + CHUNK)] * 8] * ENVS


def test_cpu_time_is_that_of_all_processes_of_a_session() -> None:
    done = subprocess.run([sys.executable, "-c", OF_A_CHILD], cwd=ROOT, start_new_session=True, timeout=60, check=False)
    assert done.returncode == 0


def test_our_policy_plays_the_script(tmp_path: Path) -> None:
    spec = PolicySpec(action_dim=7, num_action_chunks=CHUNK, state_dim=8, image_shapes={}, values_per_chunk=0)
    params = ScriptedParams(file=str(tmp_path / "found.json"), episodes=EPISODES, steps=STEPS)
    policy = Scripted(spec, params)

    def play(state: Tensor) -> Tensor:
        obs = EnvObs(env_ids=torch.arange(ENVS), images={}, state=state, instructions=("",) * ENVS)
        return policy.act(obs, greedy=True, temperature=1.0, generator=None).actions

    expected = played(Script(tmp_path / "other.json", EPISODES, STEPS, CHUNK).next, CHUNK)
    torch.testing.assert_close(played(play, CHUNK), expected)


@pytest.mark.parametrize(("chunk", "draft"), [(1, False), (CHUNK, True)])
def test_ours_is_an_evaluation_of_lerobot_s_episodes(tmp_path: Path, chunk: int, draft: bool) -> None:
    config = config_of(*overrides(STEPS, chunk, draft, tmp_path / "found.json", tmp_path))
    assert isinstance(config, EmbodiedConfig)
    env, params = config.env, config.env.init_params
    assert (params["task_suite_name"], env.task_ids, params["draft"]) == (SUITE, [TASK], draft)
    assert (params["camera_heights"], params["camera_widths"]) == (PIXELS, PIXELS)
    assert (env.eval.total_num_envs, env.eval.episodes_per_task, env.eval.max_episode_steps) == (ENVS, EPISODES, STEPS)
    assert config.model.num_action_chunks == chunk
    assert config.runner.only_eval


def test_episodes_are_compared_whatever_their_order() -> None:
    assert apart(found(1, 0.1, 0.3), found(1, 0.3, 0.1)) == 0
    assert apart(found(1, 0.1, 0.3), found(1, 0.1, 0.25)) == pytest.approx(0.05)


def test_ratios_are_of_the_same_round() -> None:
    rounds = {THEIRS: [found(1), found(2), found(4)], "a look a step": [found(2), found(6), found(8)]}
    answer = {side: [asdict(row) for row in rows] for side, rows in rounds.items()}
    assert compared(answer) == {
        "a look a step: steps/s by lerobot's": 2,
        "a look a step: steps of a CPU second by lerobot's": 2,
    }
    assert compared({"a look a step": answer["a look a step"]}) == {}
    cells = [list(column.cells) for column in show(rounds, STEPS).columns]
    assert cells[0] == ["lerobot", "embodied_rl, a look a step"]
    assert cells[1] == ["2.0 (1.0 to 4.0)", "6.0 (2.0 to 8.0)"]


def test_other_episodes_end_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = {THEIRS: lambda: found(1, 0.1), "ours": lambda: found(1, 0.2)}
    monkeypatch.setattr(lerobot_race, "sides", lambda steps: sides)
    monkeypatch.setattr("sys.argv", ["lerobot_race", "--quick"])
    with pytest.raises(SystemExit, match="ours: its episodes went elsewhere than those of lerobot"):
        lerobot_race.main()
