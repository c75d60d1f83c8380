from __future__ import annotations

import pytest

pytest.importorskip("robosuite")


def test_compiled_functions_are_not_kept_on_disk() -> None:
    """They call robosuite's, of files whose change Numba would not notice."""
    from embodied_rl.envs.libero import control

    assert control._forces.stats.cache_path is None
    assert control._command.stats.cache_path is None
