"""The checks of ``check-env``: what the rest of the project takes for granted of a simulator adapter."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from embodied_rl.commands.terminal import Finding, ok, problem, warning
from embodied_rl.envs.base import SimEnv, SimObs, SimStep
from embodied_rl.envs.reset_states import task_ranges
from embodied_rl.errors import first_line, listed, place_of

SLOTS: Final = 2
"""Slots of the env under test: enough to tell whether they disturb each other."""
STILL: Final = 0.02
"""Reward level that objects which come to rest may earn in the first step."""
LEAK_MB: Final = 0.1
"""Growth of memory at each reset that is called a leak."""
_MB: Final = 2**20
_SAMPLED: Final = 100
"""Initial states of each task that are asked for their task."""
_STATES: Final = 4
"""Initial states that are looked at."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An env under test, and what is asked of it."""

    sim: SimEnv
    params: Any
    seed: int
    horizon: int
    """``max_episode_steps`` of training."""
    relative: bool
    """Rewards are changes of the level (``use_rel_reward``)."""
    steps: int
    """Steps of each check."""
    states: Sequence[int] = field(default=())
    """Initial states that are used, of the first task."""
    elsewhere: int | None = None
    """An initial state of the last task; None: there is one task."""

    @property
    def unlike(self) -> int:
        """The initial state that has least to do with the first one."""
        return self.states[-1] if self.elsewhere is None else self.elsewhere

    def random_actions(self, count: int, key: int = 0) -> NDArray[np.float32]:
        """[count, A], the same for the same ``key``."""
        rng, choices = np.random.default_rng(key), getattr(self.sim, "action_choices", ())
        if choices:
            return rng.integers(0, choices, size=(count, len(choices))).astype(np.float32)
        return rng.uniform(-1, 1, size=(count, self.sim.action_dim)).astype(np.float32)


def check(subject: Subject, *, resets: int, picture: Path, traceback: bool = False) -> Iterator[Finding]:
    """All checks, one after another. An exception of the simulator is a finding, and ends them.

    Args:
        resets: resets over which memory is watched; 0 leaves that out.
        picture: where to put what the env's cameras see.
        traceback: let exceptions through.
    """
    parts = (sizes, observations, agents, determinism, release, groups, lone_slots, level_at_start, episodes, speed)
    try:
        for part in parts:
            yield from part(subject)
        yield from pictures(subject, picture)
        if resets:
            yield from memory(subject, resets)
    except Exception as error:  # whatever a simulator raises
        if traceback:
            raise
        yield raised(error)


def raised(error: Exception) -> Finding:
    """What a simulator raised, and where."""
    text = f"{type(error).__name__}: {error} ({place_of(error)})"
    return problem("exception", text, "the traceback: add --traceback")


def sizes(subject: Subject) -> Iterator[Finding]:
    """Attributes, and the numbering of tasks."""
    sim = subject.sim
    ranges = task_ranges(sim)
    for task_id, states in ranges.items():  # it looked at a few states alone
        sampled = (int(s) for s in np.random.default_rng(0).integers(states.start, states.stop, _SAMPLED))
        strays = [state for state in sampled if sim.task(state).task_id != task_id]
        if strays:
            found = f"initial state {strays[0]} is of task {sim.task(strays[0]).task_id}, among those of task {task_id}"
            yield problem("tasks", found, "number initial states task by task")
            return
    tasks = [sim.task(states.start) for states in ranges.values()]
    silent = [task.task_id for task in tasks if not task.instruction.strip()]
    if silent:
        yield problem("tasks", f"{listed(map(str, silent))}: no instruction", "give Task.instruction some words")
    else:
        yield ok("tasks", f"{len(tasks)} with {sim.num_reset_states} initial states: {_quoted(tasks[0].instruction)}")
    announced = getattr(type(sim), "image_shapes_of", lambda _: None)(subject.params)
    if announced is not None and dict(announced) != dict(sim.image_shapes):
        yield problem(
            "cameras",
            f"image_shapes_of says {dict(announced)}, image_shapes {dict(sim.image_shapes)}",
            "make them equal",
        )
    if not (sim.action_dim > 0 and sim.state_dim >= 0 and sim.control_hz > 0):
        yield problem(
            "sizes", f"action_dim {sim.action_dim}, state_dim {sim.state_dim}, control_hz {sim.control_hz}: below 1"
        )
    cameras = ", ".join(f"{name} {width} x {height}" for name, (height, width) in sim.image_shapes.items()) or "none"
    yield ok(
        "sizes", f"actions of {sim.action_dim}, states of {sim.state_dim}, {sim.control_hz:g} Hz, cameras: {cameras}"
    )


def observations(subject: Subject) -> Iterator[Finding]:
    """Shapes and types of what is seen after a reset."""
    slots = list(range(SLOTS))
    subject.sim.reset(slots, [subject.states[0]] * SLOTS)
    wrong = list(wrong_observation(subject.sim, subject.sim.observe(slots), SLOTS))
    frames = subject.sim.observe(slots).images
    wrong += [f"images[{name}] of one colour" for name, images in frames.items() if images.min() == images.max()]
    if wrong:
        yield problem("observations", "; ".join(wrong), "docs/environments.md says what observe() gives")
    else:
        yield ok("observations", "shapes, types and numbers are as announced")


def wrong_observation(sim: SimEnv, obs: SimObs, count: int) -> Iterator[str]:
    """What is not as the protocol says, of ``count`` slots."""
    yield from _wrong_array("state", obs.state, (count, sim.state_dim), np.float32)
    if set(obs.images) != set(sim.image_shapes):
        yield f"images of {sorted(obs.images)}, expected {sorted(sim.image_shapes)}"
    for name, images in obs.images.items():
        yield from _wrong_array(f"images[{name}]", images, (count, *sim.image_shapes.get(name, (0, 0)), 3), np.uint8)


def wrong_step(step: SimStep, count: int) -> Iterator[str]:
    """What is not as the protocol says, of ``count`` slots."""
    yield from _wrong_array("rewards", step.rewards, (count,), np.float32)
    for name in ("success", "terminated", "truncated"):
        if (array := getattr(step, name)) is not None or name == "success":
            yield from _wrong_array(name, array, (count,), np.bool_)


def _wrong_array(name: str, array: Any, shape: tuple[int, ...], dtype: type) -> Iterator[str]:
    if not isinstance(array, np.ndarray):
        yield f"{name}: a {type(array).__name__}, expected an array"
    elif array.shape != shape or array.dtype != dtype:
        got = f"{array.dtype} {list(array.shape)}"
        yield f"{name}: {got}, expected {np.dtype(dtype)} {list(shape)}"
    elif not np.isfinite(array).all():
        yield f"{name}: NaN or infinite"


def agents(subject: Subject) -> Iterator[Finding]:
    """A random agent and one that does nothing."""
    for name, scale in (("random agent", 1.0), ("zero agent", 0.0)):
        played = _play(subject, scale * subject.random_actions(subject.steps))
        wrong = dict.fromkeys(part for step in played.steps for part in wrong_step(step, 1))
        wrong |= dict.fromkeys(wrong_observation(subject.sim, played.observations[-1], 1))
        if wrong:
            yield problem(name, "; ".join(wrong), "docs/environments.md says what step() gives")
            continue
        levels = [float(step.rewards[0]) for step in played.steps]
        yield ok(name, f"{len(played.steps)} steps, reward levels {min(levels):.3g} to {max(levels):.3g}{_end(played)}")
    if not getattr(subject.sim, "tells_success", True):
        yield warning(
            "success",
            "no step said whether it succeeded, so success will be 0 %",
            "info['success'], env.init_params.success_key, or a return that counts: env.init_params.success_return",
        )


def determinism(subject: Subject) -> Iterator[Finding]:
    """The same initial state and actions, once more, and in another instance; another state is another one."""
    actions = subject.random_actions(subject.steps, key=1)
    first = _play(subject, actions)
    again = _play(subject, actions)
    if (found := first.differs(again)) is not None:
        yield problem("determinism", f"the same start and the same actions went another way: {found}", _SEED_ADVICE)
    else:
        yield ok("determinism", f"the same start and {len(first.steps)} actions lead to the same bits")
    adapter: Any = type(subject.sim)
    other = adapter(1, subject.params, subject.seed)
    try:
        state = _start(subject, 0)
        other.reset([0], [subject.states[0]])
        elsewhere = other.observe([0])
    finally:
        other.close()
    if (found := _difference(state, elsewhere)) is not None:
        yield problem("another worker", f"another instance with the same seed starts elsewhere: {found}", _SEED_ADVICE)
    else:
        yield ok("another worker", "another instance with the same seed starts alike")
    others = range(1, len(subject.states))
    alike = all(_difference(state, _start(subject, index)) is None for index in others)
    # What chance brings may differ where the first look does not.
    if others and alike and all(first.differs(_play(subject, actions, start=index)) is None for index in others):
        yield problem(
            "initial states",
            f"{listed(map(str, subject.states))} look alike, and go on alike",
            "let a reset depend on its reset_state_id; an env with one start has num_reset_states 1, and trains with "
            "env.eval.episodes_per_task=1 env.train.skip_states=0",
        )


def release(subject: Subject) -> Iterator[Finding]:
    """An episode goes on as if its env had not given back what it holds."""
    give_back = getattr(subject.sim, "release", None)
    if give_back is None:
        return
    actions = subject.random_actions(6, key=4)
    if (found := _play(subject, actions).differs(_play(subject, actions, halfway=give_back))) is not None:
        yield problem("release", f"after it an episode goes another way: {found}", "take again all that was given back")
    else:
        yield ok("release", "episodes go on to the same bits after it")


_SEED_ADVICE: Final = "an episode is to be a function of (seed, reset state, actions): seed every generator in reset()"


def groups(subject: Subject) -> Iterator[Finding]:
    """Members of a group start alike, whatever their slots did before."""
    sim, slots = subject.sim, list(range(SLOTS))
    sim.reset(slots, [subject.states[0], subject.unlike])
    for action in subject.random_actions(3, key=2):
        if _ending(sim.step(slots[:1], action[None])):
            break
    sim.reset(slots, [subject.states[0]] * SLOTS)
    obs = sim.observe(slots)
    if (found := _difference(_row(obs, 0), _row(obs, 1))) is not None:
        yield problem(
            "groups", f"two slots reset to the same state differ: {found}", "GRPO compares episodes with the same start"
        )
    else:
        yield ok("groups", "slots reset to the same state start alike, whatever they did before")


def lone_slots(subject: Subject) -> Iterator[Finding]:
    """Stepping and resetting one slot leaves the others alone."""
    sim = subject.sim
    sim.reset([0, 1], [subject.states[0], subject.unlike])
    before = sim.observe([1])
    sim.step([0], subject.random_actions(1, key=3))
    sim.reset([0], [subject.states[0]])
    if (found := _difference(before, sim.observe([1]))) is not None:
        yield problem(
            "slots", f"a step or reset of slot 0 changed what slot 1 sees: {found}", "give each slot a state of its own"
        )
    else:
        yield ok("slots", "do not disturb each other")


def level_at_start(subject: Subject) -> Iterator[Finding]:
    """A robot that does nothing earns nothing, and has not won yet."""
    levels, won = [], []
    for state in subject.states:
        subject.sim.reset([0], [state])
        step = subject.sim.step([0], np.zeros((1, subject.sim.action_dim), dtype=np.float32))
        levels.append(float(step.rewards[0]))
        if step.success[0]:
            won.append(state)
    worst = max(levels, key=abs)
    if won:
        yield warning("goal", f"the goal holds at once from initial states {listed(map(str, won))}")
    if not subject.relative:
        yield ok("start", f"first rewards up to {worst:.3g}: taken as they are (use_rel_reward=false)")
    elif abs(worst) > STILL:
        yield problem(
            "start",
            f"after a step without a command the reward level is {worst:.3g}, expected 0: it pays for being there",
            "subtract the level of the initial state, or set env.use_rel_reward=false",
        )
    else:
        yield ok("start", f"the reward level is 0 (at most {abs(worst):.1g} after a step without a command)")


def episodes(subject: Subject) -> Iterator[Finding]:
    """No reset of its own, no horizon below the configured one, and none that is reported as an end."""
    most = subject.steps if subject.sim.image_shapes else 10 * subject.steps
    played = _play(subject, 0.0 * subject.random_actions(min(subject.horizon, most)), watch=True)
    end, count = played.end, len(played.steps)
    first, moved = played.observations[0], False
    for number, obs in enumerate(played.observations[1:], start=1):
        away = _difference(first, obs) is not None
        if moved and not away and _restarted(played.observations, number):
            yield problem(
                "episodes", f"step {number} brought it back to its initial state", "only reset() may start an episode"
            )
            return
        moved = moved or away
    if end == "truncated" and count < subject.horizon:
        yield warning(
            "episodes",
            f"it cuts episodes after {count} steps, and the horizon is {subject.horizon}",
            f"env.train.max_episode_steps={count}, or leave the simulator's own limit out",
        )
    elif _ends_by_the_clock(subject, played):
        yield warning(
            "episodes",
            f"they end after {count} steps as terminated, whatever is done",
            "if that is the simulator's limit, it is truncated: what would have come is worth something",
        )
    else:
        yield ok("episodes", f"no reset of its own in {count} steps{_end(played)}")


def _ends_by_the_clock(subject: Subject, idle: _Played) -> bool:
    """Whether an episode of random actions is terminated when that of the idle agent was, without success."""
    count = len(idle.steps)
    if idle.end != "terminated" or count < 2 or np.any(idle.steps[-1].success):
        return False
    random = _play(subject, subject.random_actions(subject.horizon))
    return random.end == "terminated" and len(random.steps) == count


def _restarted(observations: Sequence[SimObs], number: int) -> bool:
    """Whether observation ``number``, equal to the first, may begin an episode. In a grid or another env of few states
    one comes back there by itself, and then goes on as chance has it."""
    few = not observations[0].images and not np.mod(observations[0].state, 1).any()
    again = (_difference(*pair) is None for pair in zip(observations, observations[number:], strict=False))
    return not few or all(again)


def speed(subject: Subject) -> Iterator[Finding]:
    """Steps a second of one slot, and what a look and a reset cost."""
    sim = subject.sim
    actions = subject.random_actions(subject.steps, key=4)
    start = time.perf_counter()
    played = _play(subject, actions)
    stepping = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(3):
        sim.observe([0])
    looking = (time.perf_counter() - start) / 3
    start = time.perf_counter()
    for state in subject.states:
        sim.reset([0], [state])
    resetting = (time.perf_counter() - start) / len(subject.states)
    yield ok(
        "speed",
        f"{len(played.steps) / stepping:.0f} steps/s in one slot; a look {1000 * looking:.1f} ms, a reset "
        f"{1000 * resetting:.1f} ms",
    )


def memory(subject: Subject, resets: int) -> Iterator[Finding]:
    """Growth of this process over many resets, after the first ones."""
    import psutil

    process = psutil.Process()

    def play(count: int) -> float:
        for number in range(count):
            subject.sim.reset([0], [subject.states[number % len(subject.states)]])
            subject.sim.step([0], subject.random_actions(1, key=number))
            subject.sim.observe([0])
        gc.collect()
        return process.memory_info().rss / _MB

    warm = play(max(len(subject.states), resets // 10))
    grown = play(resets) - warm
    text = f"{grown:+.0f} MB over {resets} resets, {warm:.0f} MB before"
    # A run of a thousand steps resets tens of thousands of times.
    if grown > LEAK_MB * max(resets, 100):
        yield problem("memory", text, "something of each episode is kept: free it in reset()")
    else:
        yield ok("memory", text)


def pictures(subject: Subject, path: Path) -> Iterator[Finding]:
    """A picture of what each camera and the video see, at the start and later."""
    from PIL import Image, ImageDraw

    sim = subject.sim
    sim.reset([0], [subject.states[0]])
    rows: list[dict[str, NDArray[np.uint8]]] = []
    unfilmed: str | None = None
    for actions in (0, min(subject.steps, 20)):
        for action in subject.random_actions(actions, key=5):
            if _ending(sim.step([0], action[None])):
                break
        looks = dict(sim.observe([0]).images)
        if unfilmed is None:
            try:
                looks["video"] = sim.render([0])
            except Exception as error:  # a simulator without a renderer still plays
                unfilmed = first_line(error)
        rows.append({name: images[0] for name, images in looks.items()})
    if unfilmed is not None:
        yield warning("video", f"render(): {unfilmed}", "evaluate with env.eval.video_cfg.save_video=false")
    wrong = [name for row in rows for name, image in row.items() if image.ndim != 3 or image.shape[2] != 3]
    if wrong:
        yield problem("video", f"{listed(dict.fromkeys(wrong))}: not [H,W,3]", "render() gives uint8 [n,H,W,3]")
        return
    if not any(rows):
        yield ok("picture", "nothing to be seen")
        return
    side, margin = 256, 18
    sheet = Image.new("RGB", (max(map(len, rows)) * (side + 4), len(rows) * (side + margin)), "white")
    draw = ImageDraw.Draw(sheet)
    for line, (row, when) in enumerate(zip(rows, ("at the start", "later"), strict=True)):
        for column, (name, image) in enumerate(row.items()):
            place = (column * (side + 4), line * (side + margin))
            draw.text(
                (place[0] + 2, place[1] + 3), f"{name}, {when}: {image.shape[1]} x {image.shape[0]}", fill="black"
            )
            shown = Image.fromarray(image)
            shown.thumbnail((side, side))
            scale = side // max(shown.size)
            shown = shown.resize((scale * shown.width, scale * shown.height), Image.Resampling.NEAREST)
            sheet.paste(shown, (place[0], place[1] + margin))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
    if dark := dict.fromkeys(name for row in rows for name, image in row.items() if image.min() == image.max()):
        hint = "does each env render into a context of its own?"
        yield problem("picture", f"{path}: {listed(dark)}: of one colour", hint)
    else:
        yield ok("picture", f"{path}: look whether up is up and red is red")


@dataclass(frozen=True, kw_only=True)
class _Played:
    """An episode of slot 0."""

    steps: list[SimStep]
    observations: list[SimObs]
    """Before the first step and after the last, or after each."""
    end: str
    """terminated, truncated, or nothing."""

    def differs(self, other: _Played) -> str | None:
        pairs = zip(self.observations, other.observations, strict=False)
        for number, (one, two) in enumerate(pairs):
            if (found := _difference(one, two)) is not None:
                return f"{'later on' if number else 'at the start'} {found}"
        levels = [[float(step.rewards[0]) for step in played.steps] for played in (self, other)]
        return None if levels[0] == levels[1] else "the reward levels"


def _play(
    subject: Subject,
    actions: NDArray[np.float32],
    *,
    start: int = 0,
    watch: bool = False,
    halfway: Callable[[], object] = lambda: None,
) -> _Played:
    """``start``: the index of the initial state; ``watch``: look after each step, which renders; ``halfway``: called
    after half of the steps."""
    sim, end = subject.sim, ""
    sim.reset([0], [subject.states[start]])
    steps, seen = [], [sim.observe([0])]
    for number, action in enumerate(actions):
        if number == len(actions) // 2:
            halfway()
        steps.append(sim.step([0], action[None]))
        if watch:
            seen.append(sim.observe([0]))
        end = _ending(steps[-1])
        if end:
            break
    if not watch:
        seen.append(sim.observe([0]))
    return _Played(steps=steps, observations=seen, end=end)


def _ending(step: SimStep) -> str:
    """terminated, truncated, or nothing: the simulator need not take another step then."""
    for name in ("truncated", "terminated"):
        if (array := getattr(step, name)) is not None and np.any(array):
            return name
    return ""


def _end(played: _Played) -> str:
    return f", then {played.end} by the simulator" if played.end else ""


def _start(subject: Subject, index: int) -> SimObs:
    subject.sim.reset([0], [subject.states[index]])
    return subject.sim.observe([0])


def _row(obs: SimObs, row: int) -> SimObs:
    return SimObs(
        images={name: images[row : row + 1] for name, images in obs.images.items()}, state=obs.state[row : row + 1]
    )


def _difference(one: SimObs, two: SimObs) -> str | None:
    """What differs, if anything."""
    if not np.array_equal(one.state, two.state, equal_nan=True):
        return f"state, by up to {np.abs(one.state - two.state).max():.2g}"
    for name in one.images:
        if not np.array_equal(one.images[name], two.images[name]):
            return f"images[{name}]"
    return None


def _quoted(text: str) -> str:
    return f'"{text}"'


def first_states(ranges: Mapping[int, range]) -> tuple[int, ...]:
    """A few initial states of the first task: others may have scenes of their own, which take seconds to build."""
    return tuple(next(iter(ranges.values()))[:_STATES])


def state_elsewhere(ranges: Mapping[int, range]) -> int | None:
    """An initial state of the last of several tasks."""
    return [*ranges.values()][-1].start if len(ranges) > 1 else None
