"""All of LIBERO's suites: what is offered can be played, what cannot is refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.composition import config_of
from embodied_rl.envs.libero.adapter import LiberoEnv, LiberoParams
from embodied_rl.envs.libero.suites import INCOMPLETE, PERTURBED, PUBLISHED, SUITES, WITHOUT_STATES, load_suite
from embodied_rl.errors import ConfigError, UserError
from embodied_rl.params import parse_params
from embodied_rl.schema import EmbodiedConfig


def test_every_registered_suite_is_offered_or_refused_with_a_reason() -> None:
    load_suite("libero_10")  # imports LIBERO quietly
    from libero.libero.benchmark import get_benchmark_dict  # pyright: ignore[reportMissingImports]

    assert set(SUITES) | set(INCOMPLETE) == set(get_benchmark_dict())
    assert len(SUITES) == len(set(SUITES)) and not set(SUITES) & set(INCOMPLETE)
    assert set(PUBLISHED) | set(PERTURBED) <= set(SUITES) and len(PERTURBED) == 16


def test_every_offered_suite_has_initial_states() -> None:
    for suite in SUITES:
        tasks = load_suite(suite)
        assert tasks and all(len(task.init_states) >= 10 and task.instruction for task in tasks), suite
    assert {len(task.init_states) for suite in PERTURBED for task in load_suite(suite)} == {50}


def test_what_is_said_to_be_missing_is_missing() -> None:
    load_suite("libero_10")
    from libero.libero import get_libero_path  # pyright: ignore[reportMissingImports]

    objects = {re.sub(".*: ", "", why) for why in INCOMPLETE.values() if "lacks an object" in why}
    assert objects == {"red_box", "blue_red_sticker", "libero_mug_green"}
    assets, states = Path(get_libero_path("assets")), Path(get_libero_path("init_states"))
    assert not [path for name in objects for path in assets.rglob(f"{name}.xml")]
    for suite, why in INCOMPLETE.items():
        scenes = Path(get_libero_path("bddl_files"), suite)
        if "lacks an object" in why:
            names = [name for name in objects if why.endswith(f": {name}")]
            assert any(f"- {names[0]}" in path.read_text() for path in scenes.glob("*.bddl")), suite
        if "initial states" in why:
            assert not (states / suite).exists(), suite
            assert ("scenes" not in why) == any(scenes.glob("*.bddl")), suite


def test_tasks_without_initial_states_are_left_out() -> None:
    [left_out] = WITHOUT_STATES
    published, tasks = load_suite("libero_10_with_mug"), load_suite(left_out)
    assert WITHOUT_STATES[left_out] == (3, 4) and len(tasks) == 8
    assert [task.instruction for task in tasks[1:4]] == [published[number].instruction for number in (8, 7, 3)]


def test_other_words_and_other_goals_reach_the_policy() -> None:
    """LIBERO's own ``task.language`` is the file's name, which is that of the published task."""
    assert load_suite("libero_10_lan")[2].instruction == "switch stove on and put moka pot on it"
    assert load_suite("libero_goal_task")[7].instruction == "turn off the stove"
    assert load_suite("libero_study_table")[0].instruction.startswith("prepare a meal"), (
        "the name lost its first letter"
    )
    for suite in ("libero_10_lan", "libero_goal_lan", "libero_object_lan", "libero_spatial_lan"):
        pairs = zip(load_suite(suite), load_suite(suite.removesuffix("_lan")), strict=True)
        assert all(other.instruction != published.instruction for other, published in pairs)


def test_published_words_stay_where_only_the_scene_changed() -> None:
    """Their scenes' files say "Pick the akita black bowl ...", which nothing was trained on."""
    for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10"):
        published = [task.instruction for task in load_suite(suite)]
        for how in ("object", "swap"):
            assert [task.instruction for task in load_suite(f"{suite}_{how}")] == published
    assert published[0] == "put both the alphabet soup and the tomato sauce in the basket"
    assert load_suite("libero_spatial")[0].instruction.startswith("pick up the black bowl between")


def test_several_suites_are_numbered_through() -> None:
    params = LiberoParams(task_suite_name=("libero_goal_task", "libero_10_with_mug"), cameras=())
    env = LiberoEnv(1, params, seed=0)
    assert env.num_reset_states == 1000
    first, last = env.task(0), env.task(999)
    assert (first.task_id, first.suite, last.task_id, last.suite) == (0, "libero_goal_task", 19, "libero_10_with_mug")
    env.close()


def test_a_suite_and_its_variations_have_a_name() -> None:
    assert LiberoParams(task_suite_name="libero_10_pro").suites == ("libero_10", *PERTURBED[:4])
    assert len(LiberoParams(task_suite_name="libero_pro").suites) == 20


@pytest.mark.parametrize("suite", ["libero_goal_swap", "libero_study_table", "libero_goal_with_rotated_stick"])
def test_a_scene_of_another_suite_is_played(suite: str) -> None:
    env = LiberoEnv(1, LiberoParams(task_suite_name=suite, cameras=(), max_cached_scenes=1), seed=0)
    states = []
    for _ in range(2):
        env.reset([0], [3])
        assert not env.step([0], np.zeros((1, 7), np.float32)).success[0]
        states.append(env.observe([0]).state)
    np.testing.assert_array_equal(*states)
    env.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("libero_100", "libero_100 cannot be played: it has no tasks of its own"),
        ("libero_object_with_trigger", "it has no initial states"),
        ("libero_goal_env", "neither its scenes nor its initial states"),
        ("libero_goal_swop", r"docs/libero_suites.md lists them\). Did you mean 'libero_goal_swap'"),
        (["libero_10", "libero_10"], "each at most once"),
        ([], "got an empty list"),
    ],
)
def test_a_suite_that_cannot_be_played_is_refused(given: str | list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_params(LiberoParams, {"task_suite_name": given}, "env.init_params")


def test_a_suite_is_chosen_by_name_and_refused_before_anything_starts() -> None:
    config = config_of("env=libero", "env.init_params.task_suite_name=libero_goal_swap")
    assert isinstance(config, EmbodiedConfig)
    assert (config.env.name, config.env.init_params["task_suite_name"]) == ("libero_goal_swap", "libero_goal_swap")
    with pytest.raises(ConfigError, match=re.escape("task_suite_name: libero_10_env cannot be played")):
        config_of("env=libero", "env.init_params.task_suite_name=libero_10_env")
