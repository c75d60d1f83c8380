"""The LIBERO expert in LIBERO's own scenes; nothing is rendered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.demonstrations.play import Noise, play_expert
from embodied_rl.envs.dummy import DummyEnv, DummyParams
from embodied_rl.envs.libero import expert as expert_package
from embodied_rl.envs.libero.adapter import LiberoEnv, LiberoParams
from embodied_rl.envs.libero.expert import LiberoExpert, articulation, clearing, insertion
from embodied_rl.envs.libero.expert.geometry import Command, Vector, yaw_of
from embodied_rl.envs.libero.expert.pick_and_place import Grasp, find_grasps
from embodied_rl.envs.libero.expert.skills import Skill
from embodied_rl.envs.libero.expert.world import Frame, Goal, World
from embodied_rl.errors import UserError

HORIZONS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}


@pytest.fixture
def spatial() -> Iterator[LiberoEnv]:
    env = LiberoEnv(1, LiberoParams(task_suite_name="libero_spatial", cameras=()), seed=0)
    yield env
    env.close()


def played(suite: str, state: int, noise_seed: int | None = None) -> EpisodeRecord:
    env = LiberoEnv(1, LiberoParams(task_suite_name=suite, cameras=()), seed=0)
    record = play_expert(env, LiberoExpert(env), state, max_steps=HORIZONS[suite], noise_seed=noise_seed)
    env.close()
    return record


def held_after_closing(env: LiberoEnv, state: int, name: str, *, steps: int) -> bool:
    """Both fingers touch it so many control steps after the expert closed them first."""
    expert, closed = LiberoExpert(env), 0
    env.reset([0], [state])
    expert.reset(0)
    for _ in range(120):
        action = expert.act(0, None)
        closed += bool(action[6] > 0) or closed > 0
        if closed > steps:
            break
        env.step([0], action[None])
    assert closed > steps
    return World(env.privileged(0)).holds_in_hand(name)


def test_it_wants_its_env() -> None:
    with pytest.raises(UserError, match="got a DummyEnv, expected a LiberoEnv"):
        LiberoExpert(DummyEnv(1, DummyParams(), seed=0))


def test_it_wants_a_reset(spatial: LiberoEnv) -> None:
    with pytest.raises(RuntimeError, match=r"call reset\(0\) first"):
        LiberoExpert(spatial).act(0, None)


def test_noise_varies_the_way_to_the_object_and_nothing_else(spatial: LiberoEnv) -> None:
    expert = LiberoExpert(spatial)

    def way(seed: int | None) -> tuple[NDArray[np.float32], float]:
        """The first actions [12,7], and how far they bring the hand down."""
        spatial.reset([0], [0])
        expert.reset(0)
        generator = None if seed is None else np.random.default_rng(seed)
        above, taken = float(spatial.observe([0]).state[0, 2]), []
        for _ in range(12):
            taken.append(expert.act(0, generator))
            spatial.step([0], taken[-1][None])
        return np.stack(taken), above - float(spatial.observe([0]).state[0, 2])

    plain, down = way(None)
    assert plain.dtype == np.float32 and np.abs(plain).max() <= 1
    assert (plain[:, 6] == -1).all() and down > 0.05  # open, towards the bowl
    noisy, _ = way(1)
    assert np.array_equal(way(1)[0], noisy)
    assert np.abs(noisy[:, :3] - plain[:, :3]).max() > 0.1 and np.abs(noisy).max() <= 1
    assert (noisy[:, 6] == -1).all()


def test_bowls_that_stand_alike_are_taken_alike(spatial: LiberoEnv) -> None:
    """In front of the hand there is nothing to choose between left and right, nor at a quarter turn either way."""
    turns, sides = [], []
    for state in range(100, 150, 7):  # the bowl in the table's middle
        spatial.reset([0], [state])
        world = World(spatial.privileged(0))
        first = find_grasps(world, world.goals[0])[0]
        turns.append(yaw_of(first.rotation) - yaw_of(world.hand.rotation))
        sides.append(first.position[1] - world.frame(world.goals[0].subject).position[1])
    assert np.abs(turns).max() < 0.4
    assert max(sides) < -0.03, "metres to the right"


def test_a_can_is_taken_at_its_middle() -> None:
    """Fingers are to be close to what they take: that they are counts for nothing. Two centimetres from the middle of a
    round can, where they touch it least, an imitation's centimetre is a miss."""
    env = LiberoEnv(1, LiberoParams(task_suite_name="libero_10", cameras=()), seed=0)
    asides = []
    for state in (0, 11, 22, 33):
        env.reset([0], [state])
        for _ in range(12):  # they are let fall
            env.step([0], np.array([[0, 0, 0, 0, 0, 0, -1]], dtype=np.float32))
        world = World(env.privileged(0))
        for goal in world.goals:
            aside = find_grasps(world, goal)[0].position - world.frame(goal.subject).position
            asides.append(np.abs(aside[:2]).max())
    env.close()
    assert max(asides) < 0.008


def test_a_bowl_is_let_down_into_a_drawer_and_closed_in_without_a_second_try() -> None:
    """The hand takes it where the fingers find room beside the drawer's front, and what is in a drawer does not stand
    in the way of closing it. All states alike: of two ways that are about as good an imitation would learn the mean."""
    env = LiberoEnv(1, LiberoParams(task_suite_name="libero_10", cameras=()), seed=0)
    turns, lengths = [], []
    for state in (150, 163, 177):
        env.reset([0], [state])
        world = World(env.privileged(0))
        turns.append(yaw_of(find_grasps(world, world.goals[0])[0].rotation))
        lengths.append(play_expert(env, LiberoExpert(env), state, max_steps=520, noise_seed=None).episode_length)
    env.close()
    assert np.ptp(turns) < 0.3
    assert max(lengths) < 150, "control steps; with a second try 178 and more"


def test_a_hand_comes_to_a_handle_the_way_it_points() -> None:
    """From outside: past the mug it would knock it over where it is a centimetre off."""
    env = LiberoEnv(1, LiberoParams(task_suite_name="libero_10", cameras=()), seed=0)
    env.reset([0], [450])
    expert, hands = LiberoExpert(env), []
    expert.reset(0)
    while (action := expert.act(0, None))[6] < 0 and len(hands) < 60:
        hands.append(World(env.privileged(0)).hand)
        env.step([0], action[None])
    env.close()
    assert 20 < len(hands) < 60
    end = hands[-1]
    way = np.stack([hand.position - end.position for hand in hands])
    before = np.flatnonzero(np.linalg.norm(way, axis=1) > 0.03)[-1]
    came = -way[before] / np.linalg.norm(way[before])
    assert came @ end.rotation[:, 2] > 0.9


def test_a_disturbed_hand_does_not_wait_before_a_handle() -> None:
    """It passes the place from which it comes straight: what waits there for noise to end is imitated for good."""
    env = LiberoEnv(1, LiberoParams(task_suite_name="libero_10", cameras=()), seed=0)
    env.reset([0], [450])
    expert, noise, hands = LiberoExpert(env), Noise(0.05, 0.8, np.random.default_rng(0), 7), []
    expert.reset(0)
    while (action := expert.act(0, None))[6] < 0 and len(hands) < 60:
        hands.append(World(env.privileged(0)).hand.position)
        env.step([0], np.clip(action + noise.next(), -1, 1)[None].astype(np.float32))
    env.close()
    still = np.linalg.norm(np.diff(hands, axis=0), axis=1) < 0.003
    assert still[: len(hands) - 5].sum() < 3


@pytest.mark.parametrize(("outward", "up"), [(-15, 0), (15, 0), (0, -12), (0, 15)])
def test_a_handle_is_taken_by_a_hand_that_is_off(monkeypatch: pytest.MonkeyPatch, outward: int, up: int) -> None:
    """By millimetres."""
    handle = insertion._handle

    def off(world: World, name: str) -> Grasp | None:
        grasp = handle(world, name)
        assert grasp is not None
        away = -grasp.rotation[:, 2] * [1, 1, 0]
        shift = away / np.linalg.norm(away) * outward + np.array([0, 0, up])
        return dataclasses.replace(grasp, position=grasp.position + shift / 1000)

    monkeypatch.setattr(insertion, "_handle", off)
    env = LiberoEnv(1, LiberoParams(task_suite_name="libero_10", cameras=()), seed=0)
    held = held_after_closing(env, 450, "white_yellow_mug_1", steps=25)
    env.close()
    assert held


def test_a_mug_is_not_taken_by_its_rim_where_its_handle_is() -> None:
    """The outer finger would close on the handle and pull the mug along."""
    env = LiberoEnv(1, LiberoParams(task_suite_name="libero_10", cameras=()), seed=0)
    env.reset([0], [303])
    world = World(env.privileged(0))
    shape, taken = world.shape("porcelain_mug_1"), find_grasps(world, world.goals[0])[0].position
    middle = shape.corners[shape.corners[:, 2] > shape.high[2] - 0.01].mean(axis=0)  # of the rim
    far = shape.centers[np.argmax(np.linalg.norm((shape.centers - middle)[:, :2], axis=1))] - middle
    side = (taken - middle)[:2] / np.linalg.norm((taken - middle)[:2])
    held = held_after_closing(env, 303, "porcelain_mug_1", steps=14)
    env.close()
    assert side @ far[:2] / np.linalg.norm(far[:2]) < 0.8
    assert held


@pytest.mark.parametrize(
    ("suite", "state", "touch", "along", "millimetres"),
    [
        pytest.param("libero_10", 100, "_contact", False, -20, id="nearer to a knob's axis"),
        pytest.param("libero_10", 100, "_contact", False, 20, id="nearer to a knob's end"),
        pytest.param("libero_goal", 150, "_handle", True, -15, id="behind a drawer's handle"),
        pytest.param("libero_goal", 150, "_handle", True, 15, id="before a drawer's handle"),
    ],
)
def test_a_part_is_moved_by_a_hand_that_is_off(
    monkeypatch: pytest.MonkeyPatch, suite: str, state: int, touch: str, along: bool, millimetres: int
) -> None:
    """Along its way, or across: a knob has five centimetres, a handle is pressed from above."""
    met = getattr(articulation, touch)

    def off(world: World, joint: str, anchor: Vector, axis: Vector) -> tuple[Vector, Vector]:
        point, direction = met(world, joint, anchor, axis)
        shift = direction if along else np.cross(direction, axis)
        return point + shift * millimetres / 1000, direction

    monkeypatch.setattr(articulation, touch, off)
    monkeypatch.setattr(expert_package, "make_room", lambda arm, goal: iter(()))  # the drawer alone
    assert moves_the_first_part(suite, state, steps=75)


@pytest.mark.parametrize("millimetres", [-12, 12])
def test_a_drawer_is_opened_by_a_hand_that_comes_too_low_or_too_high(
    monkeypatch: pytest.MonkeyPatch, millimetres: int
) -> None:
    """The middle one, whose handle has another one above it."""
    monkeypatch.setattr(articulation, "_ABOVE", articulation._ABOVE + millimetres / 1000)
    assert moves_the_first_part("libero_goal", 0, steps=85)


def moves_the_first_part(suite: str, state: int, *, steps: int) -> bool:
    """Whether the drawer or knob of the first goal is where it should be, or on its way, after so many steps."""
    env = LiberoEnv(1, LiberoParams(task_suite_name=suite, cameras=()), seed=0)
    env.reset([0], [state])
    expert, moved = LiberoExpert(env), False
    expert.reset(0)
    for _ in range(steps):
        world = World(env.privileged(0))
        goal = world.goals[0]
        if moved := world.holds(goal) if goal.target is None else not world.closed(goal.target):
            break
        env.step([0], expert.act(0, None)[None])
    env.close()
    return moved


@pytest.mark.parametrize(
    ("suite", "state", "index"),
    [
        ("libero_spatial", 0, 0),
        pytest.param("libero_10", 233, 1, marks=pytest.mark.slow),
        pytest.param("libero_10", 455, 0, marks=pytest.mark.slow, id="a mug at its handle"),
    ],
)
def test_what_is_held_is_not_dropped_when_it_takes_over(suite: str, state: int, index: int) -> None:
    """Another expert took the object up, the task's first or its second; this one has seen nothing of that."""
    env = LiberoEnv(1, LiberoParams(task_suite_name=suite, cameras=()), seed=0)
    env.reset([0], [state])
    first, second = LiberoExpert(env), LiberoExpert(env)
    first.reset(0)
    name = World(env.privileged(0)).goals[index].subject
    height = World(env.privileged(0)).frame(name).position[2]
    for _ in range(HORIZONS[suite]):
        env.step([0], first.act(0, None)[None])
        world = World(env.privileged(0))
        if world.holds_in_hand(name) and world.frame(name).position[2] > height + 0.015:
            break
    assert world.frame(name).position[2] > height + 0.015
    second.reset(0)
    grips, success = [], False
    while not success and len(grips) < 150:
        action = second.act(0, None)
        held = World(env.privileged(0)).holds_in_hand(name)
        grips.append((held, action[6]))
        success = bool(env.step([0], action[None]).success[0])
    env.close()
    assert success
    opened = next((number for number, (_, grip) in enumerate(grips) if grip < 0), len(grips))
    assert all(held for held, _ in grips[:opened])
    assert opened > 10, "it carries first"


@pytest.mark.slow
def test_a_mug_that_is_held_at_its_rim_is_set_down_and_taken_at_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held at the rim there is no room for it in the microwave."""
    env = LiberoEnv(1, LiberoParams(task_suite_name="libero_10", cameras=()), seed=0)
    env.reset([0], [460])
    first, second = LiberoExpert(env), LiberoExpert(env)
    with monkeypatch.context() as without_insertion:
        without_insertion.setattr(expert_package, "find_insertion", lambda world, goal: None)
        first.reset(0)
        mug = World(env.privileged(0)).goals[0].subject
        while not (World(env.privileged(0)).frame(mug).position[2] > 0.95):  # metres; the table's top is at 0.9
            env.step([0], first.act(0, None)[None])
    assert World(env.privileged(0)).holds_in_hand(mug)
    second.reset(0)
    success, steps = False, 0
    while not success and steps < 300:
        success, steps = bool(env.step([0], second.act(0, None)[None]).success[0]), steps + 1
    env.close()
    assert success


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "state"),
    [
        ("libero_spatial", 0),
        pytest.param("libero_spatial", 230, id="a bowl that leans in its drawer, out of which the first grasps slip"),
        pytest.param("libero_spatial", 266, id="a bowl that tips over at first"),
        ("libero_object", 50),
        pytest.param("libero_10", 100, id="a stove's lever and a pot with a handle"),
        pytest.param("libero_10", 150, id="a drawer that the forearm must not meet"),
        pytest.param("libero_10", 233, id="two mugs on two plates"),
        pytest.param("libero_10", 250, id="a book into the narrow compartment"),
        pytest.param("libero_10", 400, id="two pots side by side"),
        pytest.param("libero_10", 450, id="a mug into a microwave, which is open to its front alone"),
        pytest.param("libero_goal", 0, id="a closed drawer whose handle is below another's"),
        pytest.param("libero_goal", 170, id="a closed drawer to be filled"),
        pytest.param("libero_goal", 250, id="a plate, which has no edge to hold"),
        pytest.param("libero_goal", 450, id="a bottle on a rack whose place leans"),
        pytest.param("libero_90", 910, id="a pan with a handle"),
        pytest.param("libero_90", 1150, id="one drawer to open, one to close"),
        pytest.param("libero_90", 1790, id="a microwave's door that opens out of reach"),
        pytest.param("libero_90", 1980, id="a knob to be turned off, all the way"),
    ],
)
def test_it_succeeds_within_the_horizon(suite: str, state: int) -> None:
    assert played(suite, state).success


def test_a_drawer_is_not_closed_before_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(name: str, worked: bool) -> Callable[..., Skill]:
        def skill(arm: object, goal: Goal) -> Skill:
            done.append(name)
            yield Command(position=np.zeros(3), rotation=np.eye(3), gripper=0.0)
            return worked

        return skill

    done: list[str] = []
    goals = (Goal(predicate="in", subject="bowl", target="drawer"), Goal(predicate="close", subject="drawer"))
    hand = Frame(position=np.zeros(3), rotation=np.eye(3))
    world = SimpleNamespace(
        goals=goals, holds=lambda goal: False, holds_in_hand=lambda name: False, success=False, hand=hand
    )
    monkeypatch.setattr(expert_package, "place", attempt("place", worked=False))
    monkeypatch.setattr(expert_package, "switch", attempt("switch", worked=True))
    plan = expert_package.play(SimpleNamespace(world=world))  # type: ignore[arg-type]
    for _ in range(5):
        next(plan)
    assert done == ["place"] * 5


def test_what_is_held_is_let_go_of_before_a_drawer_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where DAgger's expert takes over from a policy that holds the bowl before the closed drawer."""

    def step(name: str) -> Callable[..., Skill]:
        def skill(arm: object, *_: object) -> Skill:
            done.append(name)
            yield Command(position=np.zeros(3), rotation=np.eye(3), gripper=0.0)
            return False

        return skill

    done: list[str] = []
    for name in ("release", "retreat", "switch"):
        monkeypatch.setattr(expert_package, name, step(name))
    world = SimpleNamespace(closed=lambda name: True, holds_in_hand=lambda name: True)
    goal = Goal(predicate="in", subject="bowl", target="drawer")
    assert len(list(expert_package.place(SimpleNamespace(world=world), goal))) == 3  # type: ignore[arg-type]
    assert done == ["release", "retreat", "switch"]


@pytest.mark.parametrize(
    ("suite", "state", "index", "covered"),
    [
        pytest.param("libero_goal", 185, 0, True, id="the goal is the bowl alone"),
        pytest.param("libero_90", 415, 1, True, id="opening is a goal, too"),
        pytest.param("libero_90", 435, 1, False, id="a bowl that may stay"),
    ],
)
def test_what_an_open_drawer_would_cover_is_put_aside(suite: str, state: int, index: int, covered: bool) -> None:
    """Otherwise the hand comes down onto the drawer, attempt after attempt: so the first two episodes were lost."""
    env = LiberoEnv(1, LiberoParams(task_suite_name=suite, cameras=()), seed=0)
    env.reset([0], [state])
    expert, world = LiberoExpert(env), World(env.privileged(0))
    bowl = world.goals[index]
    (joint,), start = world.joints(bowl.target or ""), world.frame(bowl.subject).position

    def free(world: World) -> bool:
        return any(grasp.free for grasp in find_grasps(world, bowl, world.opened_shape(joint)))

    assert free(world) is not covered
    expert.reset(0)
    for _ in range(120):
        env.step([0], expert.act(0, None)[None])
        world = World(env.privileged(0))
        if abs(world.joint(joint)) > 0.01:  # it is being opened
            break
    moved, left_free = np.linalg.norm(world.frame(bowl.subject).position - start), free(world)
    env.close()
    assert left_free
    assert moved > 0.03 if covered else moved < 0.005
    assert played(suite, state).success


def test_a_drawer_is_opened_at_last_though_nothing_could_be_put_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def failing(name: str) -> Callable[..., Skill]:
        def skill(*_: object) -> Skill:
            done.append(name)
            yield Command(position=np.zeros(3), rotation=np.eye(3), gripper=0.0)
            return False

        return skill

    monkeypatch.setattr(clearing, "_spot_aside", lambda world, goal: np.zeros(2))
    monkeypatch.setattr(clearing, "find_grasps", lambda world, goal: [None])
    for name in ("reach", "retreat"):
        monkeypatch.setattr(clearing, name, failing(name))
    bowl = Goal(predicate="in", subject="bowl", target="drawer")
    list(clearing.make_room(SimpleNamespace(world=None), bowl))  # type: ignore[arg-type]
    assert done == ["reach", "retreat"] * 3


@pytest.mark.slow
def test_it_succeeds_with_noise() -> None:
    plain, noisy = played("libero_spatial", 400), played("libero_spatial", 400, noise_seed=0)
    assert noisy.success and noisy.episode_length > plain.episode_length
