"""``check-env``: each check finds an env that is broken in its way, and sound ones pass."""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.commands.check_env import main
from embodied_rl.commands.env_checks import SLOTS, Subject, check, first_states, state_elsewhere
from embodied_rl.envs.base import SimObs, SimStep, Task
from embodied_rl.envs.dummy import DummyEnv, DummyParams
from embodied_rl.envs.rendering import SimulatorMissingError
from embodied_rl.errors import UserError
from tests.configs import REQUIRED


class Drifting(DummyEnv):
    """Every reset starts a bit further on: the generator is not seeded by the state."""

    resets = 0

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        super().reset(slots, reset_state_ids)
        self.resets += 1
        self._position[list(slots)] += 1e-3 * self.resets


class Noisy(DummyEnv):
    noise = np.random.default_rng(0)

    def step(self, slots: Sequence[int], actions: np.ndarray) -> SimStep:
        step = super().step(slots, actions)
        self._position[list(slots)] += self.noise.normal(size=2) * 1e-3
        return step


class OfTheWorker(DummyEnv):
    """Initial states depend on how many envs there are in the process."""

    built = 0

    def __init__(self, num_slots: int, params: DummyParams, seed: int) -> None:
        super().__init__(num_slots, params, seed)
        OfTheWorker.built += 1
        self.shift = 1e-2 * OfTheWorker.built

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        super().reset(slots, reset_state_ids)
        self._position[list(slots)] += self.shift


class Unequal(DummyEnv):
    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        super().reset(slots, reset_state_ids)
        self._position[list(slots)] += 1e-3 * np.array(slots)[:, None]


class OneScene(DummyEnv):
    def step(self, slots: Sequence[int], actions: np.ndarray) -> SimStep:
        step = super().step(slots, actions)
        self._position[:] = self._position[slots[0]]
        return step


class OneTask(DummyEnv):
    """Its slots play the task that was reset last."""

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        super().reset(slots, reset_state_ids)
        number = self.task(reset_state_ids[-1]).task_id
        self._goal[:] = np.abs(self._goal) * ((-1.0) ** (number % 2), (-1.0) ** (number // 2))


class AlwaysAlike(DummyEnv):
    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        super().reset(slots, [0] * len(slots))


class Rewarding(DummyEnv):
    def step(self, slots: Sequence[int], actions: np.ndarray) -> SimStep:
        step = super().step(slots, actions)
        return SimStep(rewards=step.rewards + np.float32(0.5), success=step.success)


class Wide(DummyEnv):
    def step(self, slots: Sequence[int], actions: np.ndarray) -> SimStep:
        step = super().step(slots, actions)
        wide: Any = step.rewards.astype(np.float64)
        return SimStep(rewards=wide, success=step.success)


class NotANumber(DummyEnv):
    def observe(self, slots: Sequence[int]) -> SimObs:
        obs = super().observe(slots)
        return SimObs(images=obs.images, state=obs.state * np.float32(np.nan))


class Renamed(DummyEnv):
    def observe(self, slots: Sequence[int]) -> SimObs:
        obs = super().observe(slots)
        return SimObs(images={"front": obs.images["agentview"]}, state=obs.state)


class Dark(DummyEnv):
    def observe(self, slots: Sequence[int]) -> SimObs:
        obs = super().observe(slots)
        return SimObs(images={name: 0 * images for name, images in obs.images.items()}, state=obs.state)


class DarkAfterAnother(DummyEnv):
    """As a renderer whose context another env's end took away."""

    closed = False

    def close(self) -> None:
        type(self).closed = True

    def observe(self, slots: Sequence[int]) -> SimObs:
        obs = super().observe(slots)
        return SimObs(images={name: images * (not self.closed) for name, images in obs.images.items()}, state=obs.state)


class Misannounced(DummyEnv):
    @staticmethod
    def image_shapes_of(params: DummyParams) -> dict[str, tuple[int, int]]:
        return {"agentview": (8, 8)}

    def __init__(self, num_slots: int, params: DummyParams, seed: int) -> None:
        super().__init__(num_slots, params, seed)
        self.image_shapes = DummyEnv.image_shapes_of(params)


class Forgetful(DummyEnv):
    def release(self) -> None:
        self._position[:] = 0


class Lasting(DummyEnv):
    def release(self) -> None:
        """There is nothing to give back."""


class Silent(DummyEnv):
    def task(self, reset_state_id: int) -> Task:
        return Task(task_id=super().task(reset_state_id).task_id, instruction=" ", suite="")


class Shuffled(DummyEnv):
    def task(self, reset_state_id: int) -> Task:
        return Task(task_id=reset_state_id % 2, instruction="go", suite="")


class Restarting(DummyEnv):
    """Gymnasium's habit of starting the next episode by itself. The zero agent gets there by a wind."""

    count = 0

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        super().reset(slots, reset_state_ids)
        self.count, self.state = 0, reset_state_ids[0]

    def step(self, slots: Sequence[int], actions: np.ndarray) -> SimStep:
        self.count += 1
        step = super().step(slots, actions + np.float32(0.01))
        if self.count == 12:
            self.reset(slots, [self.state] * len(slots))
        return step


class Short(DummyEnv):
    count = 0

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        super().reset(slots, reset_state_ids)
        self.count = 0

    def step(self, slots: Sequence[int], actions: np.ndarray) -> SimStep:
        self.count += 1
        step = super().step(slots, actions)
        over = np.full(len(slots), self.count >= 9)
        return SimStep(rewards=step.rewards, success=step.success, truncated=over)


class ShortAsAnEnd(Short):
    def step(self, slots: Sequence[int], actions: np.ndarray) -> SimStep:
        step = super().step(slots, actions)
        return SimStep(rewards=step.rewards, success=step.success, terminated=step.truncated)


class Strict(Short):
    """As many simulators: no step after the end."""

    def step(self, slots: Sequence[int], actions: np.ndarray) -> SimStep:
        assert self.count < 2, "reset it first"
        step = super().step(slots, actions)
        return SimStep(rewards=step.rewards, success=step.success, truncated=np.full(len(slots), self.count >= 2))


class NoNumberAtAll(DummyEnv):
    def observe(self, slots: Sequence[int]) -> SimObs:
        obs = super().observe(slots)
        return SimObs(images=obs.images, state=np.full_like(obs.state, np.nan))


class Falling(DummyEnv):
    """It may end when the idle agent does, but not by the clock."""

    def step(self, slots: Sequence[int], actions: np.ndarray) -> SimStep:
        step = super().step(slots, actions - np.array([0.15, 0], np.float32))
        return SimStep(rewards=step.rewards, success=step.success, terminated=self._position[list(slots), 0] < -0.9)


class Mute(DummyEnv):
    tells_success = False


class Won(DummyEnv):
    def step(self, slots: Sequence[int], actions: np.ndarray) -> SimStep:
        step = super().step(slots, actions)
        return SimStep(rewards=step.rewards, success=np.ones_like(step.success))


class Hoarding(DummyEnv):
    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        super().reset(slots, reset_state_ids)
        megabyte = mmap.mmap(-1, 2**20)  # not from what earlier tests of this process have freed
        megabyte.write(b"1" * 2**20)
        self.kept = [*getattr(self, "kept", []), megabyte]


class Raising(DummyEnv):
    def step(self, slots: Sequence[int], actions: np.ndarray) -> SimStep:
        raise RuntimeError("the physics exploded\nin two lines")


class Flat(DummyEnv):
    def render(self, slots: Sequence[int]) -> np.ndarray:
        return super().render(slots)[..., 0]


def findings(kind: type[DummyEnv], tmp_path: Path, **settings: Any) -> dict[str, tuple[str, str]]:
    """What -> (status, text)."""
    params = DummyParams(image_size=16)
    sim = kind(SLOTS, params, 0)
    about: dict[str, Any] = {"params": params, "seed": 0, "horizon": 32, "relative": True, "steps": 20, **settings}
    ranges = {number: range(64 * number, 64 * number + 64) for number in range(4)}
    subject = Subject(sim=sim, states=first_states(ranges), elsewhere=state_elsewhere(ranges), **about)
    found = check(subject, resets=100 if kind is Hoarding else 0, picture=tmp_path / "seen.png")
    return {finding.what: (finding.status, finding.text) for finding in found}


@pytest.mark.parametrize("slippery", [True, False])
def test_a_grid_with_one_start_is_sound(slippery: bool, tmp_path: Path) -> None:
    """On slippery ice one comes back to the start now and then, and another seed slips another way."""
    from embodied_rl.envs.gymnasium import GymnasiumEnv, GymnasiumParams

    def of(starts: int) -> dict[str, tuple[str, str]]:
        params = GymnasiumParams(id="FrozenLake-v1", kwargs={"is_slippery": slippery}, num_reset_states=starts)
        about: dict[str, Any] = {"horizon": 100, "relative": False, "steps": 20, "params": params, "seed": 0}
        states = first_states({0: range(starts)})
        subject = Subject(sim=GymnasiumEnv(SLOTS, params, 0), states=states, **about)
        found = check(subject, resets=0, picture=tmp_path / "seen.png")
        return {finding.what: (finding.status, finding.text) for finding in found}

    problems = {what: text for what, (status, text) in of(1).items() if status == "problem"}
    assert not problems
    same = ("problem", "0, 1, 2, 3 look alike, and go on alike")
    assert of(64).get("initial states") == (None if slippery else same)


def test_a_sound_env_passes_and_is_pictured(tmp_path: Path) -> None:
    found = findings(DummyEnv, tmp_path)
    assert {status for status, _ in found.values()} == {"ok"}, found
    assert "release" not in found and findings(Lasting, tmp_path)["release"][0] == "ok"
    from PIL import Image

    with Image.open(tmp_path / "seen.png") as picture:
        assert len(picture.getcolors(2**20) or []) > 3, "something can be seen"


@pytest.mark.parametrize(
    ("kind", "what", "text"),
    [
        (Drifting, "determinism", "the same start and the same actions went another way: at the start state"),
        (Noisy, "determinism", "later on state, by up to"),
        (OfTheWorker, "another worker", "another instance with the same seed starts elsewhere: state"),
        (Unequal, "groups", "two slots reset to the same state differ: state, by up to 0.001"),
        (OneScene, "slots", "a step or reset of slot 0 changed what slot 1 sees"),
        (OneTask, "slots", "a step or reset of slot 0 changed what slot 1 sees"),
        (AlwaysAlike, "initial states", "0, 1, 2, 3 look alike"),
        (Rewarding, "start", "the reward level is 0.5, expected 0"),
        (Wide, "random agent", r"rewards: float64 [1], expected float32 [1]"),
        (NotANumber, "observations", "state: NaN or infinite"),
        (Renamed, "observations", "images of ['front'], expected ['agentview']"),
        (Dark, "observations", "images[agentview] of one colour"),
        (DarkAfterAnother, "picture", "agentview: of one colour"),
        (Misannounced, "cameras", "image_shapes_of says {'agentview': (8, 8)}, image_shapes {'agentview': (16, 16)}"),
        (Forgetful, "release", "after it an episode goes another way: later on state, by up to"),
        (Silent, "tasks", "0, 1, 2, 3: no instruction"),
        (Shuffled, "tasks", "among those of task 0"),
        (Restarting, "episodes", "step 12 brought it back to its initial state"),
        (Hoarding, "memory", "MB over 100 resets"),
        (Raising, "exception", "RuntimeError: the physics exploded"),
        (Flat, "video", "video: not [H,W,3]"),
    ],
)
def test_an_env_that_is_broken_in_one_way(kind: type[DummyEnv], what: str, text: str, tmp_path: Path) -> None:
    found = findings(kind, tmp_path)
    assert found[what][0] == "problem" and text in found[what][1], found


@pytest.mark.parametrize(
    ("kind", "what", "text"),
    [
        (Short, "episodes", "it cuts episodes after 9 steps, and the horizon is 32"),
        (ShortAsAnEnd, "episodes", "they end after 9 steps as terminated, whatever is done"),
        (Mute, "success", "no step said whether it succeeded, so success will be 0 %"),
        (Won, "goal", "the goal holds at once from initial states 0, 1, 2, 3"),
    ],
)
def test_what_may_be_meant_is_a_warning(kind: type[DummyEnv], what: str, text: str, tmp_path: Path) -> None:
    warned = [f for f in findings(kind, tmp_path).items() if f[1][0] == "warning"]
    assert [(name, said) for name, (_, said) in warned] == [(what, text)]


def test_no_step_is_taken_after_an_end(tmp_path: Path) -> None:
    assert {status for status, _ in findings(Strict, tmp_path, horizon=2).values()} == {"ok"}


def test_what_is_no_number_is_no_chance(tmp_path: Path) -> None:
    found = findings(NoNumberAtAll, tmp_path)
    assert found["observations"][0] == "problem" and found["determinism"][0] == "ok"


def test_an_end_that_actions_put_off_is_none_of_the_clock(tmp_path: Path) -> None:
    status, text = findings(Falling, tmp_path)["episodes"]
    assert status == "ok" and text.endswith("then terminated by the simulator")


def test_rewards_that_are_taken_as_they_are_may_start_anywhere(tmp_path: Path) -> None:
    assert findings(Rewarding, tmp_path, relative=False)["start"][0] == "ok"


ENV = """
from embodied_rl.envs.dummy import DummyEnv

class Mine(DummyEnv):
    pass

class Broken(DummyEnv):
    def reset(self, slots, reset_state_ids):
        super().reset(slots, [0] * len(slots))
"""


def test_an_env_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "mine.py").write_text(ENV)
    monkeypatch.chdir(tmp_path)
    arguments = ["env=dummy", "env.init_params.image_size=16", "--resets", "5", "--picture", "seen.png"]
    assert main(["env.env_type=mine.py:Mine", *arguments]) == 0
    assert (tmp_path / "seen.png").is_file() and "problem" not in capsys.readouterr().out
    assert main(["env.env_type=mine.py:Broken", *arguments]) == 1
    assert "let a reset depend on its reset_state_id" in capsys.readouterr().out


class Unfinished:
    @dataclass(frozen=True)
    class Params:
        pass

    def step(self) -> None:
        """Nothing yet."""


class Unbuilt(DummyEnv):
    def __init__(self, num_slots: int, params: DummyParams, seed: int) -> None:
        raise OSError("no licence")


def test_an_adapter_that_cannot_be_played_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["env=dummy", "env.eval.video_cfg.save_video=false"]
    with pytest.raises(
        UserError, match=r"Unfinished has no task\(\), reset\(\), observe\(\), close\(\); what each does: docs/"
    ):
        main([*own, f"env.env_type={__file__}:Unfinished"])
    assert main([*own, f"env.env_type={__file__}:Unbuilt"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "OSError: no licence (test_check_env.py, line" in said
    with pytest.raises(OSError, match="no licence"):
        main([*own, f"env.env_type={__file__}:Unbuilt", "--traceback"])


def test_mistakes_are_said(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(UserError, match="this task has no env"):
        main(["task=math"])
    with pytest.raises(UserError, match="expected at least 2 and 0"):
        main(["env=dummy", "--steps", "1"])
    with pytest.raises(SystemExit):
        main([])
    assert "usage: python train.py check-env" in capsys.readouterr().out


ENVS = sorted(path.stem for path in (Path(__file__).parents[2] / "config/env").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("env", ENVS)
def test_every_env_that_is_installed(env: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each keeps what training takes for granted; a task of each suite."""
    try:
        choice = [f"env={env}", *REQUIRED.get(env, ())]
        if env.startswith("libero") and env != "libero_spatial":  # full pictures of one suite are enough of that length
            choice.append("env.init_params.draft=true")
        status = main([*choice, "--resets", "40", "--steps", "20", "--picture", str(tmp_path / "seen.png")])
    except UserError as error:
        missing = isinstance(error, SimulatorMissingError) or re.search("assets|no usable Vulkan", str(error))
        if not missing:
            raise
        pytest.skip(str(error))
    assert status == 0, capsys.readouterr().out
