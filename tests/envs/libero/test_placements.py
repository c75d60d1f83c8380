"""Initial states that are drawn beside the published ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied_rl.envs.libero import placements
from embodied_rl.envs.libero.adapter import LiberoEnv, LiberoParams, _scenes
from embodied_rl.envs.libero.scene import Scene, SceneSpec
from embodied_rl.envs.libero.suites import load_suite
from embodied_rl.errors import UserError

SETTLE = 10
STATES = 16
RAMEKIN, DRAWER = 5, 4
"""Tasks of libero_spatial: a bowl on a ramekin, from whose rim it may fall, and a bowl in a drawer that is open."""


def params(drawn: int) -> LiberoParams:
    return LiberoParams(task_suite_name="libero_spatial", cameras=(), drawn_states=drawn)


def scene_of(task_id: int) -> Scene:
    return Scene(
        SceneSpec(bddl_file=load_suite("libero_spatial")[task_id].bddl_file, draft=True, max_height=256, max_width=256)
    )


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    scene = scene_of(RAMEKIN)
    yield scene
    scene.close()


def places(scene: Scene, init_states: list[NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Object -> [states,3] metres, once they have settled."""
    settled = np.stack([scene.start(state, SETTLE).view.qpos for state in init_states])
    env: Any = scene._env
    model = env.sim.model
    return {
        name: settled[:, (at := model._model.jnt_qposadr[model.joint_name2id(body.joints[-1])]) : at + 3]
        for name, body in env.objects_dict.items()
    }


@pytest.mark.parametrize(
    "task_id", [RAMEKIN, pytest.param(DRAWER, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)]
)
def test_objects_stand_where_published_states_have_them(task_id: int) -> None:
    """Within 2 cm of where published ones have them, and spread as widely; in the drawer half as widely."""
    scene = scene_of(task_id)
    published = load_suite("libero_spatial")[task_id].init_states
    drawn = [scene.drawn(published, number, SETTLE) for number in range(STATES)]
    theirs, ours = places(scene, list(published[:STATES])), places(scene, drawn)
    scene.close()
    assert len(ours) == 5
    for name, points in ours.items():
        low, high = theirs[name].min(0), theirs[name].max(0)
        assert ((points > low - 0.02) & (points < high + 0.02)).all(), name
        widths = points[:, :2].std(0) / theirs[name][:, :2].std(0)
        assert ((widths > 0.3) & (widths < 1.8)).all(), (name, widths)


def test_robot_drawers_and_fixtures_stay(scene: Scene) -> None:
    published = load_suite("libero_spatial")[RAMEKIN].init_states
    fixtures = scene._model.body_pos.copy(), scene._model.body_quat.copy()
    drawn = scene.drawn(published, 3, SETTLE)
    moved = np.flatnonzero(drawn != published[3]) - 1
    env: Any = scene._env
    joints = [env.sim.model.joint_name2id(body.joints[-1]) for body in env.objects_dict.values()]
    free = {int(at) + i for at in scene._model.jnt_qposadr[joints] for i in range(7)}
    assert set(moved) <= free and len(moved) == 10
    np.testing.assert_array_equal(scene._model.body_pos, fixtures[0])
    np.testing.assert_array_equal(scene._model.body_quat, fixtures[1])


def test_a_state_is_the_same_whatever_was_drawn_or_played_before(scene: Scene) -> None:
    published = load_suite("libero_spatial")[RAMEKIN].init_states
    np.random.seed(5)
    one = scene.drawn(published, 7, SETTLE)
    after = np.random.uniform()
    snapshot = scene.start(one, SETTLE)
    other = scene_of(RAMEKIN)
    other.drawn(published, 50, SETTLE)
    other.step(other.start(published[2], SETTLE), np.ones(7))
    np.testing.assert_array_equal(other.drawn(published, 7, SETTLE), one)
    np.testing.assert_array_equal(other.start(one, SETTLE).physics, snapshot.physics)
    other.close()
    assert np.abs(scene.drawn(published, 57, SETTLE) - one).max() > 1e-3
    np.random.seed(5)
    assert np.random.uniform() == after, "NumPy's global generator is the caller's"


@pytest.mark.parametrize(
    ("suite", "task_id", "stays"),
    [
        ("libero_spatial", 8, {"akita_black_bowl_1", "akita_black_bowl_2"}),
        pytest.param("libero_object", 0, {"basket_1"}, marks=pytest.mark.slow),
    ],
)
def test_objects_exchange_their_places(suite: str, task_id: int, stays: set[str]) -> None:
    task = load_suite(suite)[task_id]
    scene = Scene(SceneSpec(bddl_file=task.bddl_file, draft=True, max_height=256, max_width=256))
    own = places(scene, list(task.init_states[:8]))
    regions = {name: np.median(points, 0)[:2] for name, points in own.items()}
    drawn = [scene.drawn(task.init_states, number, SETTLE, exchange=True) for number in range(STATES)]
    found = places(scene, drawn)
    again = scene.drawn(task.init_states, STATES, SETTLE)
    kept = places(scene, [again])
    scene.close()
    taken = {
        name: {min(regions, key=lambda region: float(np.linalg.norm(regions[region] - point[:2]))) for point in points}
        for name, points in found.items()
    }
    for name, where in taken.items():
        assert where == {name} if name in stays else len(where) >= 3, (name, where)
        for point in found[name]:
            nearest = min(float(np.linalg.norm(region - point[:2])) for region in regions.values())
            assert nearest < 0.06, (name, point)
        assert np.linalg.norm(kept[name][0, :2] - regions[name]) < 0.06, "later draws are without exchange"


def test_a_goal_on_the_table_is_not_exchanged() -> None:
    task = load_suite("libero_10")[6]  # "put the chocolate pudding to the right of the plate"
    scene = Scene(SceneSpec(bddl_file=task.bddl_file, draft=True, max_height=256, max_width=256))
    fixtures = scene._model.body_pos.copy()
    with pytest.raises(
        UserError,
        match=r"put_the_white_mug_on_the_plate.*: the goal living_room_table_plate_right_region is a place",
    ):
        scene.drawn(task.init_states, 0, SETTLE, exchange=True)
    np.testing.assert_array_equal(scene._model.body_pos, fixtures)
    assert scene.drawn(task.init_states, 0, SETTLE).shape == task.init_states[0].shape
    scene.close()


def test_exchanged_places_are_those_of_drawn_states() -> None:
    with pytest.raises(ValueError, match=r"exchange_places: got true, but only drawn states have it; set drawn_states"):
        LiberoParams(task_suite_name="libero_spatial", exchange_places=True)


def test_numbers_follow_the_published_ones() -> None:
    env = LiberoEnv(2, params(3), seed=0)
    try:
        assert env.num_reset_states == 10 * 53
        assert [env.task(i).task_id for i in (0, 49, 50, 52, 53)] == [0, 0, 0, 0, 1]
        first = RAMEKIN * 53
        env.reset([0, 1], [first + 49, first + 50])
        published, drawn = (env.privileged(slot).sim.data.qpos.copy() for slot in (0, 1))
        assert np.abs(published - drawn).max() > 1e-3
        plain = LiberoEnv(1, params(0), seed=0)
        plain.reset([0], [RAMEKIN * 50 + 49])
        np.testing.assert_array_equal(plain.privileged(0).sim.data.qpos, published)
        plain.close()
    finally:
        env.close()
    assert not _scenes._scenes


def test_objects_without_room_are_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    from robosuite.utils.errors import RandomizationError

    def full(env: Any, fixtures: Any, exchange: bool) -> Any:
        raise RandomizationError("full")

    published = load_suite("libero_spatial")[RAMEKIN].init_states
    monkeypatch.setattr(placements, "_placements", full)
    with pytest.raises(
        UserError, match=r"libero_spatial/pick_up_the_black_bowl_on_the_ramekin.* 60 0: objects find no"
    ):
        scene.drawn(published, 60, SETTLE)


def test_objects_that_do_not_rest_as_usual_are_placed_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    from embodied_rl.envs.libero import scene as module

    published = load_suite("libero_spatial")[RAMEKIN].init_states
    first = scene.drawn(published, 70, SETTLE)
    asked: list[int] = []

    def fallen_at_first(env: Any, positions: NDArray[np.float64]) -> NDArray[np.float64]:
        asked.append(len(asked))
        return placements.heights(env, positions) - (0.1 if asked[-1] == module._TYPICAL else 0.0)

    scene._drawn.clear()
    monkeypatch.setattr(module, "heights", fallen_at_first)
    second = scene.drawn(published, 70, SETTLE)
    assert len(asked) == module._TYPICAL + 2
    assert np.abs(first - second).max() > 1e-3
    assert (second.tobytes(), SETTLE) in scene._settled and (first.tobytes(), SETTLE) not in scene._settled


def test_objects_that_never_rest_as_usual_are_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied_rl.envs.libero.scene._AS_USUAL", 0.0)
    published = load_suite("libero_spatial")[RAMEKIN].init_states
    with pytest.raises(
        UserError, match=r" 61: in 20 draws objects never came to rest .* set env.init_params.drawn_states=0"
    ):
        scene.drawn(published, 61, SETTLE)
    with pytest.raises(UserError, match=r"never came to rest .* set env.init_params.exchange_places=false"):
        scene.drawn(published, 61, SETTLE, exchange=True)
