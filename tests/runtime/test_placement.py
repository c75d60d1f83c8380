from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.cli import config_of
from embodied_rl.runtime.placement import (
    PlacementError,
    count_accelerators,
    later_lines_win,
    parse_placement,
    parse_ranks,
    separate_overrides,
)
from embodied_rl.tasks.validation import placement_of

COMPONENTS = ("actor", "rollout", "env")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", (0, 1, 2, 3, 4)),
        (3, (3,)),
        ("3", (3,)),
        ("0,2,3", (0, 2, 3)),
        ("3,0", (0, 3)),
        ("0-3", (0, 1, 2, 3)),
        ("2-2", (2,)),
        ("0-3,5", (0, 1, 2, 3, 5)),
        (" 0 - 1 , 4 ", (0, 1, 4)),
        ("12", (12,)),
    ],
)
def test_ranks(text: str | int, expected: tuple[int, ...]) -> None:
    assert parse_ranks(text, num_slots=5) == expected


@pytest.mark.parametrize("text", ["", ",", "0,", "3-1", "a", "-1", "0--1", "1.5", "0-1-2", "All", None, "0:3"])
def test_what_is_no_rank_is_refused_with_the_syntax(text: str) -> None:
    with pytest.raises(PlacementError, match="expected all, 3, 0,2,3, 0-3 or 0-3,5"):
        parse_ranks(text, num_slots=4)


@pytest.mark.parametrize("text", ["0,0", "0-3,2", "1-2,2-3"])
def test_a_rank_named_twice_is_refused(text: str) -> None:
    with pytest.raises(PlacementError, match=f"got '{text}', which names a rank twice"):
        parse_ranks(text, num_slots=4)


@st.composite
def written_ranks(draw: st.DrawFn) -> tuple[str, tuple[int, ...]]:
    """Disjoint pieces in any order, and the ranks they name."""
    bounds = sorted(draw(st.sets(st.integers(0, 60), min_size=2, max_size=12)))
    pieces: list[str] = []
    ranks: list[int] = []
    for first, end in zip(bounds[::2], bounds[1::2], strict=False):
        last = draw(st.integers(first, end - 1))
        spaces = " " * draw(st.integers(0, 1))
        single = first == last and draw(st.booleans())
        pieces.append(f"{spaces}{first}{spaces}" if single else f"{first}{spaces}-{spaces}{last}")
        ranks += range(first, last + 1)
    return ",".join(draw(st.permutations(pieces))), tuple(sorted(ranks))


@given(written_ranks())
def test_ranks_roundtrip(written: tuple[str, tuple[int, ...]]) -> None:
    text, ranks = written
    assert parse_ranks(text, num_slots=1) == ranks


def test_components_that_share_a_line_are_collocated() -> None:
    placement = parse_placement({"actor,rollout": "0-1", "env": "2-3"}, COMPONENTS, num_accelerators=4)
    assert placement.slots == {"actor": (0, 1), "rollout": (0, 1), "env": (2, 3)}
    assert [placement.device("rollout", rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert [placement.device("env", rank) for rank in range(placement.world_size("env"))] == ["cuda:2", "cuda:3"]


def test_all_means_every_accelerator() -> None:
    placement = parse_placement({"actor, rollout ,env": "all"}, COMPONENTS, num_accelerators=3)
    assert {name: placement.world_size(name) for name in COMPONENTS} == dict.fromkeys(COMPONENTS, 3)


def test_simulators_may_outnumber_the_accelerators() -> None:
    placement = parse_placement({"actor,rollout": 0, "env": "0-2"}, COMPONENTS, sharing=("env",), num_accelerators=2)
    assert [placement.device("env", rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    with pytest.raises(PlacementError, match=r"actor: got rank 2, but this machine has 2 accelerator\(s\)"):
        parse_placement({"actor": 2, "rollout,env": 0}, COMPONENTS, sharing=("env",), num_accelerators=2)


def test_without_accelerators_ranks_are_processes_on_the_cpu() -> None:
    placement = parse_placement({"actor": 0, "rollout": 0, "env": "0-63"}, COMPONENTS, num_accelerators=0)
    assert placement.world_size("env") == 64
    assert placement.device("env", 63) == "cpu"


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            {"actor": 0, "rollout": 0, "evn": 0},
            "got component 'evn', expected actor, rollout, env. Did you mean 'env'",
        ),
        ({"actor,rollout": 0, "env,actor": 1}, "component 'actor' is placed twice"),
        ({"actor,actor,rollout,env": 0}, "component 'actor' is placed twice"),
        ({"actor": 0}, "no ranks for rollout, env; every component needs some, e.g. rollout: 0"),
        ({"actor": "3-1", "rollout,env": 0}, "actor: got '3-1', expected all, 3"),
        ({"actor": "0,0", "rollout,env": 0}, "actor: got '0,0', which names a rank twice"),
        ({"actor,rollout": 0, "env": "1-4"}, "env: got rank 4, but this machine has 4 accelerator(s), numbered from 0"),
        ({"actor,,rollout,env": 0}, "got component '', expected actor, rollout, env"),
    ],
)
def test_a_wrong_placement_is_refused(placement: dict[str, str | int], message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        parse_placement(placement, COMPONENTS, num_accelerators=4)
    assert message in str(caught.value)


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("2,5,7", 3), ("GPU-8f2c, GPU-91aa", 2)])
def test_the_visible_devices_are_the_accelerators(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_accelerators() == count


def test_otherwise_the_device_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert count_accelerators() == sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))


@pytest.mark.parametrize(
    ("argument", "separate"),
    [
        ("{actor,rollout: 0-3}", ["actor=0-3", "rollout=0-3"]),
        ("{actor,rollout: 0-3, env: 4-7}", ["actor=0-3", "rollout=0-3", "env=4-7"]),
        ("{ actor , rollout : 0,2,3 , env: all }", ['actor="0,2,3"', 'rollout="0,2,3"', "env=all"]),
        ('{"actor,rollout": "0,1", env: 2}', ['actor="0,1"', 'rollout="0,1"', "env=2"]),
        ("{actor: 1}", ["actor=1"]),
    ],
)
def test_joined_names_on_the_command_line(argument: str, separate: list[str]) -> None:
    """Hydra's grammar has no commas in names."""
    key = "cluster.component_placement"
    for plus in ("", "+", "++"):
        assert separate_overrides(f"{plus}{key}={argument}") == [f"{key}.{override}" for override in separate]


def test_a_joined_key_on_the_command_line() -> None:
    key = "cluster.component_placement"
    assert separate_overrides(f"{key}.actor,rollout=0-3") == [f"{key}.actor=0-3", f"{key}.rollout=0-3"]


@pytest.mark.parametrize(
    "argument",
    [
        "cluster.component_placement.actor=0,1",  # a sweep
        "cluster.component_placement={actor,rollout}",
        "cluster.component_placement={0: actor}x",
        "cluster.component_placement=3",
        "cluster.num_threads={actor: 1}",
        "env=dummy",
    ],
)
def test_what_else_is_on_the_command_line_stays(argument: str) -> None:
    assert separate_overrides(argument) == [argument]


def test_a_joined_line_wins_over_the_defaults() -> None:
    defaults: dict[str, str | int] = {"actor": 0, "rollout": 0, "env": "0-1"}
    assert later_lines_win(defaults) == defaults
    assert later_lines_win({**defaults, "actor,rollout": "0-3"}) == {"env": "0-1", "actor,rollout": "0-3"}
    assert later_lines_win({**defaults, "actor, rollout": "0-3"}, ["actor"]) == {
        "actor": 0,
        "env": "0-1",
        "rollout": "0-3",
    }
    assert later_lines_win({**defaults, "actor,rollout,env": "all"}, ["actor", "rollout", "env"]) == defaults


def test_rlinfs_placement_over_the_defaults(tmp_path: Path) -> None:
    """On the command line, in a file of one's own, and the one over the other."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/joined.yaml").write_text(
        "# @package _global_\ncluster:\n  component_placement:\n    actor,rollout: 0-1\n"
    )
    own = (f"hydra.searchpath=[{tmp_path}]", "experiment=joined")
    for overrides, ranks in (
        (("cluster.component_placement={actor,rollout: 0-1}",), (2, 2, 2)),
        (("cluster.component_placement={actor,rollout,env: 0-3}",), (4, 4, 4)),
        (own, (2, 2, 2)),
        ((*own, "cluster.component_placement.actor=0"), (1, 2, 2)),
        ((*own, "cluster.component_placement={rollout,actor: 0}"), (1, 1, 2)),
    ):
        placement = placement_of(config_of("env=dummy", *overrides))
        assert tuple(placement.world_size(name) for name in COMPONENTS) == ranks, overrides
