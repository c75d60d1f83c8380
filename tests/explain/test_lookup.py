"""Every key is answered, in all the ways a user may write it."""

from __future__ import annotations

import pytest

from embodied_rl.elsewhere import SYSTEMS, load_entries
from embodied_rl.errors import UserError
from embodied_rl.explain.catalog import Answer, Index, split_system


@pytest.fixture(scope="module")
def index() -> Index:
    return Index()


def capabilities(answer: Answer) -> set[str]:
    return {match.entry.capability for match in answer.matches}


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_key_is_answered_with_and_without_its_system(index: Index, system: str) -> None:
    for entry in load_entries():
        for key in entry.keys(system):
            asked = index.answer(f"{system}.{key}")
            assert [(m.entry, m.keys) for m in asked.matches] == [(entry, {system: [key]})], key
            anyone = index.answer(key)
            assert any(m.entry is entry and key in m.keys.get(system, ()) for m in anyone.matches), key


def test_every_own_key_is_answered(index: Index) -> None:
    for key in index.own:
        assert key in index.answer(key).own
    for name in index.groups:
        assert name in index.answer(name).groups


@pytest.mark.parametrize(
    "query", ["verl.actor_rollout_ref.actor.clip_ratio", "verl.actor.clip_ratio", "actor.clip_ratio", "verl.clip_ratio"]
)
def test_last_parts_are_enough(index: Index, query: str) -> None:
    [match] = index.answer(query).matches
    assert match.keys == {"verl": ["actor_rollout_ref.actor.clip_ratio"]}
    assert match.entry.ours == ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high")


def test_parts_are_whole_words(index: Index) -> None:
    """``ratio`` is no part of ``clip_ratio``."""
    with pytest.raises(UserError):
        index.answer("verl.atio")


def test_a_key_that_several_systems_have_shows_each(index: Index) -> None:
    keys = [match.keys for match in index.answer("gpu_memory_utilization").matches]
    assert keys == [
        {
            "verl": ["actor_rollout_ref.rollout.gpu_memory_utilization"],
            "roll": ["actor_infer.strategy_args.strategy_config.gpu_memory_utilization"],
            "areal": ["vllm.gpu_memory_utilization"],
            "cosmos_rl": ["rollout.gpu_memory_utilization"],
            "rlinf": ["rollout.gpu_memory_utilization"],
        }
    ]


def test_one_system_may_mean_several_capabilities(index: Index) -> None:
    found = capabilities(index.answer("areal.eps_clip"))
    assert found == {"PPO clip range, one number for both sides", "Value clip"}


def test_own_key_gives_the_equivalents(index: Index) -> None:
    answer = index.answer("algorithm.clip_ratio_c")
    assert answer.own == ["algorithm.clip_ratio_c"]
    [entry] = index.equivalents("algorithm.clip_ratio_c")
    assert entry.keys("areal") == ["actor.c_clip", "ref.c_clip"]
    assert entry.keys("cosmos_rl") == ["train.train_policy.lower_bound_ratio"]


def test_a_key_may_be_ours_and_theirs_with_another_meaning(index: Index) -> None:
    answer = index.answer("rollout.backend")
    assert answer.own == ["rollout.backend"]
    assert {system for match in answer.matches for system in match.keys} == {"cosmos_rl", "rlinf"}


def test_names_below_a_free_form_key(index: Index) -> None:
    [match] = index.answer("cosmos.train.train_policy.reward_function.boxed_math").matches
    assert match.keys == {"cosmos_rl": ["train.train_policy.reward_function"]}
    assert index.answer("env.init_params.camera_heights_of_mine").own == ["env.init_params"]


def test_sections_and_systems_list_their_keys(index: Index) -> None:
    [section] = index.answer("verl.rollout.val_kwargs").sections
    assert {key.rpartition(".")[2] for key in section.keys} == {"temperature", "do_sample", "top_k", "top_p", "n"}
    [everything] = index.answer("ROLL").sections
    assert everything.keys == list(index.theirs["roll"])
    assert {section.system for section in index.answer("actor.optim").sections} == {"", "verl", "rlinf"}


def test_a_group_that_is_a_section_too_shows_both(index: Index) -> None:
    answer = index.answer("cluster")
    assert answer.groups == ["cluster"]
    assert "cluster.stall_timeout" in answer.sections[0].keys


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("verl.actor.clip_ratoi", "verl.actor.clip_ratio"),
        ("actor_rollout_ref.actor.clip_ratoi", "actor_rollout_ref.actor.clip_ratio"),
        ("verl.actor_rollout_ref.actor.clip_ratoi", "verl.actor_rollout_ref.actor.clip_ratio"),
        ("algorithm.clip_ratio_lwo", "algorithm.clip_ratio_low"),
        ("rlinf.actor.optim.value_rl", "rlinf.actor.optim.value_lr"),
        ("ROLL.learning_rat", "ROLL.learning_rate"),
        ("areal.gconfig.n_sample", "areal.gconfig.n_samples"),
        ("Cosmos-RL.train.ckpt.max_kept", "Cosmos-RL.train.ckpt.max_keep"),
    ],
)
def test_near_misses_get_a_suggestion_as_long_as_what_was_typed(index: Index, query: str, expected: str) -> None:
    with pytest.raises(UserError, match=f"Did you mean '{expected}'"):
        index.answer(query)


def test_nonsense_gets_no_suggestion(index: Index) -> None:
    with pytest.raises(UserError, match=r"^xyzzy: no such key, neither ours nor of verl, ROLL.*RLinf\.$"):
        index.answer("xyzzy")


def test_what_follows_an_equals_sign_is_ignored(index: Index) -> None:
    assert index.answer("++verl.actor.clip_ratio=0.3").matches == index.answer("verl.actor.clip_ratio").matches


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("verl.a.b", ("verl", "a.b")),
        ("Cosmos-RL.a", ("cosmos_rl", "a")),
        ("cosmos.a", ("cosmos_rl", "a")),
        ("RLinf", ("rlinf", "")),
        ("rollout.a", ("", "rollout.a")),
    ],
)
def test_systems_are_recognised(text: str, expected: tuple[str, str]) -> None:
    assert split_system(text) == expected
