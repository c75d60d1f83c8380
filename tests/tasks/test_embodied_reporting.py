from __future__ import annotations

import pytest

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.evaluation.success import success_table
from embodied_rl.tasks.embodied import reporting
from embodied_rl.tasks.math import reporting as math_reporting
from embodied_rl.workers.env import EnvReport
from embodied_rl.workers.rollout import RolloutReport
from tests.configs import embodied, small_math

RECOMPUTED = "actor.recompute_logprobs=true"
METRICS = {
    "actor/samples": 8.0,
    "actor/groups": 2.0,
    "actor/groups_equal": 0.0,
    "actor/groups_unscored": 0.0,
    "actor/score": 0.5,
    "rollout/rounds": 1.0,
    "rollout/truncated": 0.0,
    "rollout/unverified": 0.0,
}


@pytest.mark.parametrize(
    ("gap", "overrides", "warned"),
    [
        (0.051, (RECOMPUTED,), True),
        (0.05, (RECOMPUTED,), False),
        (0.3, (RECOMPUTED, "actor.logprob_gap_warning=0.5"), False),
        (0.6, (RECOMPUTED, "actor.logprob_gap_warning=0.5"), True),
        (0.6, (RECOMPUTED, "actor.logprob_gap_warning=null"), False),
        # What another part of the algorithm computes may be off for a reason: stale rollouts.
        (0.6, (), False),
        (None, (RECOMPUTED,), False),
    ],
)
def test_a_rollout_that_computes_otherwise_is_pointed_out(
    gap: float | None, overrides: tuple[str, ...], warned: bool
) -> None:
    metrics = METRICS if gap is None else METRICS | {"actor/logprob_gap": gap}
    for text in (
        reporting.warning(metrics, embodied("env=dummy", *overrides)),
        math_reporting.warning(metrics, small_math(*overrides)),
    ):
        assert (text is not None) == warned
        if text is not None:
            assert text.startswith(
                "the rollout's log-probabilities differ from the trainer's by more than actor.logprob"
            )


def test_what_taught_nothing_comes_first() -> None:
    metrics = METRICS | {"actor/logprob_gap": 1.0, "actor/samples": 0.0}
    text = reporting.warning(metrics, embodied("env=dummy", RECOMPUTED))
    assert text is not None
    assert text.startswith("no update:")


def test_nothing_is_said_of_groups_that_nobody_compared() -> None:
    metrics = {"actor/samples": 8.0, "actor/score": 0.5}
    assert reporting.warning(metrics, embodied("env=dummy", "algorithm=grpo")) is None


def test_each_task_has_a_metric_with_a_stable_readable_name() -> None:
    told = {
        3: "Put the black bowl (in the drawer), and close it",
        12: "put both the alphabet soup and the tomato sauce in the basket on the left of the table",
        40: "关上抽屉",
    }
    records = [
        EpisodeRecord(
            env_id=0,
            task_id=task,
            instruction=text,
            reset_state_id=state,
            success=state < 1,
            episode_return=0.0,
            episode_length=1,
        )
        for task, text in told.items()
        for state in range(task % 3 + 1)
    ]
    assert reporting.task_metrics(success_table(records)) == {
        "03_put_the_black_bowl_in_the_drawer_and_close_it/success": 1.0,
        "12_put_both_the_alphabet_soup_and_the_tomato_sauce_in_the_basket/success": 1.0,
        "40/success": 0.5,
    }


NOTHING = METRICS | {"actor/samples": 0.0, "actor/groups": 0.0}


@pytest.mark.parametrize(
    ("score", "of_episodes", "of_texts"),
    [
        (0.0, "over all groups it is 0; start from a better policy", "over all groups it is 0; start from a better"),
        (0.5, "it is 0.5; use more groups or larger ones, or", "it is 0.5; use more groups or larger ones, or widen"),
        (1.0, "it is 1; there is little left to learn", "it is 1; there is little left to learn"),
    ],
)
def test_why_the_filter_left_nothing(score: float, of_episodes: str, of_texts: str) -> None:
    metrics = NOTHING | {"actor/score": score}
    text = reporting.warning(metrics, embodied("env=libero_spatial", "algorithm=dapo"))
    assert text is not None
    assert "algorithm.filter_rewards masked every group: none has a success rate of 0.01 to 0.99" in text
    assert of_episodes in text
    text = math_reporting.warning(metrics, small_math("algorithm=dapo"))
    assert text is not None
    assert "algorithm.filter_rewards masked every group: none has a mean score of 0.01 to 0.99" in text
    assert of_texts in text


def test_what_else_leaves_nothing() -> None:
    text = reporting.warning(METRICS | {"actor/samples": 0.0}, embodied("env=dummy", "algorithm=decoupled_ppo"))
    assert text is not None
    assert "algorithm.behav_imp_weight_cap=5.0 left out every unit" in text
    metrics = NOTHING | {"actor/groups_unscored": 1.0, "rollout/unverified": 0.25, "rollout/truncated": 0.5}
    text = math_reporting.warning(metrics, small_math("algorithm=dapo", "reward.mask_truncated=true"))
    assert text is not None
    assert "25% are unverified and 50% were cut and left out (reward.mask_truncated)" in text
    text = math_reporting.warning(metrics, small_math("algorithm=dapo"))
    assert text is not None
    assert "25% are unverified and 0% were cut" in text


def test_what_envs_wait_for_a_policy_that_waits_for_weights_is_not_its_answers() -> None:
    """Two seconds of each of three were of the update that came before."""
    envs = [EnvReport(episodes=[], seconds={"wait": 3.0}, env_steps=8, videos=[], open_episodes=[]) for _ in range(2)]
    policies = [RolloutReport(seconds={"wait": 0.5, "weights_wait": 2.0}, inferences=1, interruptions=1)]
    rollout = reporting.Rollout(envs=envs, policies=policies)
    waited = reporting.waits([rollout])
    assert (waited["answers"], waited["requests"], waited["weights"]) == (1.0, 0.5, 0.0)
    metrics = reporting.rollout_metrics([rollout], episodes=[], unfinished=0, steps_before=0.0, rollout_s=1.0)
    assert metrics["time/weights_wait"] == 2.0
