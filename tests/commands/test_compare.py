"""``python train.py compare``: what it says, what it refuses, and where it finds evaluations."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.commands.compare import main
from embodied_rl.errors import UserError
from embodied_rl.evaluation.comparison import check_comparable
from embodied_rl.evaluation.eval_file import find_evaluation, read_evaluation
from tests.commands.evaluations import completions, episodes, write

META = {
    "env_type": "libero",
    "max_episode_steps": 200,
    "ignore_terminations": False,
    "temperature": 0.0,
    "num_action_chunks": 8,
    "cameras": {"agentview": [128, 128], "wrist": [128, 128]},
    "init_params": {"draft": False, "num_steps_wait": 10, "max_cached_scenes": 4, "render_height": 256},
    "versions": {"python": "3.11.7", "torch": "2.11.0", "mujoco": "3.17.0", "robosuite": "1.4.0"},
    "policy_version": 3,
}


def changed(meta: Mapping[str, Any], key: str, value: object) -> dict[str, Any]:
    """``meta`` with another value at a dotted key; ``None`` takes it out."""
    section, _, name = key.partition(".")
    if name:
        return {**meta, section: {**meta[section], name: value}}
    if value is None:
        return {k: v for k, v in meta.items() if k != key}
    return {**meta, key: value}


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        main(arguments)
    return str(caught.value)


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    """Two tasks of 8: the second file solves 5 more of task 0 and 1 fewer of task 1."""
    first = write(tmp_path / "a.json", episodes([[1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]]), META)
    second = write(tmp_path / "b.json", episodes([[1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0, 0]]), META)
    return first, second


def test_numbers_by_hand(two: tuple[str, str], tmp_path: Path) -> None:
    main([*two, "--json", str(tmp_path / "out" / "c.json")])
    report = json.loads((tmp_path / "out" / "c.json").read_text())
    [comparison] = report["comparisons"]
    overall, (one, other) = comparison["overall"], comparison["per_task"]
    assert (one["pairs"], one["first"], one["second"], one["won"], one["lost"], one["p"]) == (
        8,
        0.25,
        0.875,
        5,
        0,
        1 / 16,
    )
    assert (other["first"], other["second"], other["won"], other["lost"], other["p"]) == (0.5, 0.375, 0, 1, 1.0)
    assert (overall["won"], overall["lost"], overall["change"]["value"], overall["pairs"]) == (5, 1, 0.25, 16)
    assert overall["p"] == 2 * (1 + 6) / 64
    low, high = overall["change"]["interval"]
    assert -0.1 < low < 0.1 < 0.4 < high < 0.6
    assert [e["path"] for r in report["recipes"] for e in r["evaluations"]] == list(two)
    assert "aggregates" not in comparison


def test_the_table_fits_80_columns(two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    main(two)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    assert any(row[:1] == ["0"] and " ".join(row[-9:]) == "25.0 87.5 5 0 +62.5 +25.0 to +87.5 0.062" for row in rows)
    assert any(row[:3] == ["all", "2", "tasks"] and row[-5:-4] == ["+25.0"] for row in rows)
    assert "B against A: the same 16 episodes" in " ".join(" ".join(lines).split())


def test_several_runs_are_aggregated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        write(tmp_path / f"{name}{place}.json", episodes([[1] * solved + [0] * (8 - solved)]), META)
        for name, counts in (("old", (1, 2)), ("new", (6, 7, 8)))
        for place, solved in enumerate(counts)
    ]
    out = tmp_path / "c.json"
    main([f"old={runs[0]},{runs[1]}", "--json", str(out), f"new={runs[2]},{runs[3]},{runs[4]}"])
    [comparison] = json.loads(out.read_text())["comparisons"]
    assert comparison["overall"]["p"] is None and comparison["overall"]["won"] is None
    assert comparison["aggregates"]["first"]["mean"]["value"] == pytest.approx(1.5 / 8)
    assert comparison["aggregates"]["second"]["mean"]["value"] == pytest.approx(7 / 8)
    assert comparison["aggregates"]["change"]["mean"]["value"] == comparison["overall"]["change"]["value"] == 5.5 / 8
    said = " ".join(capsys.readouterr().out.split())
    assert "new against old" in said and "interquartile mean" in said
    assert "old has 2 runs" in said and "new has" not in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("env_type", "maniskill"),
        ("max_episode_steps", 400),
        ("ignore_terminations", True),
        ("temperature", 0.5),
        ("num_action_chunks", 4),
        ("num_action_chunks", None),
        ("cameras.agentview", [256, 256]),
        ("cameras.front", [128, 128]),
        ("init_params.draft", True),
        ("init_params.num_steps_wait", 20),
        ("versions.mujoco", "3.3.0"),
    ],
)
def test_other_conditions_are_refused_unless_allowed(
    two: tuple[str, str], tmp_path: Path, key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "other.json", episodes([[1] * 8, [0] * 8]), changed(META, key, value))
    for pair in ((two[0], other), (other, two[0])):
        message = refusal(*pair)
        assert f"\n  - {key}: " in message and f"--allow {key}" in message
        assert len(message.splitlines()) == 3
        assert refusal(*pair, "--allow", "instructions") == message
        for allowed in {key, key.split(".")[0]}:
            capsys.readouterr()
            main([*pair, "--allow", allowed])
            assert f"note: {key}: " in capsys.readouterr().out


@pytest.mark.parametrize(("first", "second"), [("temperature", "cameras.agentview"), ("versions.mujoco", "env_type")])
def test_every_reason_is_given(two: tuple[str, str], tmp_path: Path, first: str, second: str) -> None:
    meta = changed(changed(META, first, 7), second, 9)
    other = write(tmp_path / "other.json", episodes([[1] * 8, [0] * 7]), meta)
    message = refusal(two[0], other)
    assert all(f"\n  - {key}: " in message for key in (first, second, "episodes"))
    assert f"\n  - {second}: " in refusal(two[0], other, "--allow", first, "--allow", "episodes")


@pytest.mark.parametrize(
    "key",
    ["init_params.max_cached_scenes", "init_params.cache_scenes", "init_params.render_height", "policy_version"],
)
def test_what_changes_no_episode_may_differ(two: tuple[str, str], tmp_path: Path, key: str) -> None:
    main([two[0], write(tmp_path / "c.json", episodes([[1] * 8, [0] * 8]), changed(META, key, 512))])


@pytest.mark.parametrize("threshold", [10.0, None])
def test_what_a_success_is_by_the_return(tmp_path: Path, threshold: float | None) -> None:
    meta = {**META, "env_type": "gymnasium", "init_params": {"id": "CartPole-v1", "success_return": threshold}}
    files = [
        write(tmp_path / f"{relative}.json", episodes([[1, 0, 0, 0]]), {**meta, "use_rel_reward": relative})
        for relative in (True, False)
    ]
    if threshold is None:
        main(files)
    else:
        assert "use_rel_reward: True and False" in refusal(*files)


def test_a_parameter_newer_than_a_report_had_its_default(two: tuple[str, str], tmp_path: Path) -> None:
    listed = episodes([[1] * 8, [0] * 8])
    same = write(tmp_path / "same.json", listed, changed(META, "init_params.drawn_states", 0))
    other = write(tmp_path / "other.json", listed, changed(META, "init_params.drawn_states", 50))
    for pair in ((two[0], same), (same, two[0])):
        main([*pair])
    assert "init_params.drawn_states: 0 and 50" in refusal(two[0], other)
    foreign = {**META, "env_type": "nobody.knows:It"}
    old = write(tmp_path / "old.json", listed, foreign)
    new = write(tmp_path / "new.json", listed, changed(foreign, "init_params.more", 0))
    assert "init_params.more: nothing and 0" in refusal(old, new)


def test_another_torch_is_noted(two: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([two[0], write(tmp_path / "c.json", episodes([[1] * 8, [0] * 8]), changed(META, "versions.torch", "3.0"))])
    assert "note: versions.torch: '2.11.0' and '3.0' (A and B)" in capsys.readouterr().out


def test_other_episodes_are_refused_or_only_the_shared_ones_compared(two: tuple[str, str], tmp_path: Path) -> None:
    fewer = write(tmp_path / "fewer.json", episodes([[1] * 8, [0] * 3]), META)
    assert "episodes: 16 and 11, of which 11 are the same (A and B)" in refusal(two[0], fewer)
    main([two[0], fewer, "--allow", "episodes", "--json", str(tmp_path / "out.json")])
    [comparison] = json.loads((tmp_path / "out.json").read_text())["comparisons"]
    assert [row["pairs"] for row in comparison["per_task"]] == [8, 3]
    seeded = write(tmp_path / "seeded.json", episodes([[1] * 8, [0] * 8], seed=4), META)
    assert "none of their episodes in common" in refusal(two[0], seeded, "--allow", "episodes")


def test_other_instructions_are_refused(two: tuple[str, str], tmp_path: Path) -> None:
    entries = episodes([[1] * 8, [0] * 8])
    entries[3]["instruction"] = "do something else"
    other = write(tmp_path / "c.json", entries, META)
    assert "instructions: 1 of 16 episodes have another instruction" in refusal(two[0], other)
    main([two[0], other, "--allow", "instructions"])


MATH = {
    "reward": "final_answer",
    "reward_params": {},
    "success_threshold": 1.0,
    "max_prompt_length": 16,
    "max_new_tokens": 8,
    "min_new_tokens": 0,
    "stop": [],
    "temperature": 0.0,
    "completions_per_prompt": 1,
    "versions": {"torch": "2.11.0", "math-verify": "0.9.0"},
}


def math_file(path: Path, prompts: Sequence[Sequence[bool | None]], meta: Mapping[str, Any] = MATH) -> str:
    return write(path, completions(prompts), meta, kind="completions")


def test_prompts_are_compared_likewise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = math_file(tmp_path / "a.json", [[False]] * 6 + [[True]] * 2 + [[None], [True]])
    second = math_file(tmp_path / "b.json", [[True]] * 5 + [[False]] * 2 + [[True], [True], [None]])
    main([first, second, "--json", str(tmp_path / "c.json")])
    [comparison] = json.loads((tmp_path / "c.json").read_text())["comparisons"]
    overall = comparison["overall"]
    assert (overall["pairs"], overall["won"], overall["lost"], comparison["prompts_left_out"]) == (8, 5, 1, 2)
    assert "2 prompts left out, unverified" in " ".join(capsys.readouterr().out.split())


def test_several_completions_have_an_interval_and_no_test(tmp_path: Path) -> None:
    meta = {**MATH, "completions_per_prompt": 2}
    first = math_file(tmp_path / "a.json", [[True, False], [False, None], [False, False]], meta)
    second = math_file(tmp_path / "b.json", [[True, True], [False, True], [False, False]], meta)
    main([first, second, "--json", str(tmp_path / "c.json")])
    overall = json.loads((tmp_path / "c.json").read_text())["comparisons"][0]["overall"]
    assert (overall["first"], overall["second"]) == (pytest.approx(0.5 / 3), 0.5)
    assert overall["p"] is None and overall["change"]["interval"] is not None


def test_several_completions_that_agree_have_no_test_either(tmp_path: Path) -> None:
    meta = {**MATH, "completions_per_prompt": 2}
    first = math_file(tmp_path / "a.json", [[True, True], [False, False]], meta)
    second = math_file(tmp_path / "b.json", [[True, True], [True, True]], meta)
    main([first, second, "--json", str(tmp_path / "c.json")])
    overall = json.loads((tmp_path / "c.json").read_text())["comparisons"][0]["overall"]
    assert (overall["first"], overall["second"]) == (0.5, 1.0)
    assert (overall["won"], overall["lost"], overall["p"]) == (None, None, None)


def test_prompts_asked_twice_are_paired_in_their_order(tmp_path: Path) -> None:
    entries = completions([[True], [False], [True]])
    for entry in entries:
        entry["prompt_id"] = "same"
    first = write(tmp_path / "a.json", entries, MATH, kind="completions")
    evaluation = read_evaluation(Path(first))
    assert [outcome.score for outcome in evaluation.outcomes.values()] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 1.0),
        ("reward", "math_verify"),
        ("max_new_tokens", 16),
        ("stop", ["\n"]),
        ("versions.math-verify", "0.8"),
        ("completions_per_prompt", 4),
    ],
)
def test_other_sampling_or_scoring_is_refused(tmp_path: Path, key: str, value: object) -> None:
    first = math_file(tmp_path / "a.json", [[True], [False]])
    second = math_file(tmp_path / "b.json", [[True], [True]], changed(MATH, key, value))
    assert f"\n  - {key}: " in refusal(first, second)
    main([first, second, "--allow", key])


def test_nothing_verified_is_refused(tmp_path: Path) -> None:
    first, second = math_file(tmp_path / "a.json", [[None]]), math_file(tmp_path / "b.json", [[True]])
    assert "no prompt has a verified completion in all evaluations" in refusal(first, second)


def test_episodes_and_prompts_are_not_compared(two: tuple[str, str], tmp_path: Path) -> None:
    assert "lists episodes" in refusal(two[0], math_file(tmp_path / "c.json", [[True]]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"meta": {}, "overall": {}, "per_task": []}, r"lists no episodes, .* evaluate the checkpoint again"),
        ({"schema_version": 3, "meta": {}, "overall": {}}, r"schema_version: got 3, expected 2"),
        (
            {"schema_version": 2, "kind": "dreams", "meta": {}, "overall": {}},
            r"kind: got 'dreams', expected episodes or",
        ),
        ({"schema_version": 2, "kind": "episodes", "meta": {}, "overall": {}, "episodes": []}, r"the list is empty"),
        (
            {"schema_version": 2, "kind": "episodes", "meta": {}, "overall": {}},
            r"episodes: Input should be a valid list",
        ),
        (
            {"schema_version": 2, "kind": "episodes", "meta": {}, "overall": {}, "episodes": [{"task_id": 1}]},
            r"episodes\.0\.instruction: ",
        ),
        ({"step": 1}, r"is no evaluation's eval\.json"),
        ([1], r"is no evaluation's eval\.json"),
    ],
)
def test_files_that_cannot_be_used(two: tuple[str, str], tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(content))
    said = refusal(two[0], str(path))
    assert said.startswith(f"{path}: ") and re.search(message, said)


def test_the_same_episode_twice_is_refused(two: tuple[str, str], tmp_path: Path) -> None:
    entries = episodes([[1, 0]])
    path = write(tmp_path / "c.json", [*entries, entries[0]], META)
    assert f"{path}: episodes: 3 entries, but 2 different episodes" in refusal(two[0], path)


def test_no_json(two: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{")
    assert "cannot be read as JSON" in refusal(two[0], str(tmp_path / "c.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{a}"], "expected two or more"),
        (["{a}", "{a}"], "a file compared with itself"),
        (["{a}", "{a}/x"], "no such file or directory"),
        (["x={a}", "x={b}"], "two recipes have this name"),
        (["x=", "{b}"], "is empty"),
        (["{a},", "{b}"], "is empty"),
        (["{a}", "{b}", "--allow", "temprature"], "Did you mean 'temperature'"),
        (["{a}", "{b}", "--jsn", "x"], "usage: "),
        (["{a}", "{b}", "--json"], "usage: "),
    ],
)
def test_wrong_arguments(two: tuple[str, str], arguments: list[str], message: str) -> None:
    assert message in refusal(*(argument.format(a=two[0], b=two[1]) for argument in arguments))


def test_where_evaluations_are_found(tmp_path: Path) -> None:
    run, older = tmp_path / "exp" / "2026-02", tmp_path / "exp" / "2026-01"
    for directory, step in ((run, 2), (run, 10), (older, 99)):
        write(directory / f"eval_step_{step:06d}" / "eval.json", episodes([[1]]), META)
    (tmp_path / "exp" / "2026-03").mkdir()  # a run without an evaluation
    last = run / "eval_step_000010" / "eval.json"
    for place in (last, last.parent, run, tmp_path / "exp", f"{run}:10"):
        assert find_evaluation(str(place)) == last
    assert find_evaluation(f"{run}:2") == run / "eval_step_000002" / "eval.json"
    for place, message in (
        (f"{run}:3", "no evaluation after step 3; there are those after step 2, 10"),
        (str(tmp_path / "exp" / "2026-03"), "holds no evaluation"),
        (f"{tmp_path}/nowhere:3", "no such directory"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            find_evaluation(place)


def test_a_recipe_s_own_runs_have_to_be_comparable(two: tuple[str, str], tmp_path: Path) -> None:
    other = write(tmp_path / "c.json", episodes([[1] * 8, [0] * 8]), changed(META, "temperature", 1.0))
    assert "temperature: 0.0 and 1.0 (A[0] and A[1])" in refusal(f"{two[0]},{other}", two[1])


def test_notes_name_the_pair(two: tuple[str, str]) -> None:
    named = [read_evaluation(Path(path), name) for name, path in zip("AB", two, strict=True)]
    assert check_comparable(named) == []


def test_picture(two: tuple[str, str], tmp_path: Path) -> None:
    main([*two, "--plot", str(tmp_path / "new" / "c.png")])
    assert (tmp_path / "new" / "c.png").read_bytes().startswith(b"\x89PNG")
    assert "not supported" in refusal(*two, "--plot", str(tmp_path / "c.nonsense"))


def test_help_and_a_comparison_need_no_torch(two: tuple[str, str]) -> None:
    code = """
import sys, time
start = time.perf_counter()
from embodied_rl.cli import main
try:
    main(["compare", *sys.argv[1:]])
except SystemExit as ending:  # of --help
    assert not ending.code
print("loaded:", [name for name in ("torch", "matplotlib", "scipy") if name in sys.modules])
"""
    for arguments in (["--help"], list(two)):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert done.stdout.rstrip().endswith("loaded: []")
