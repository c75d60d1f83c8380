"""``python train.py explain <key>``: a config key of another system gets ours, and one of ours gets theirs.

``keys/*.yaml`` has the data, an entry a capability; ``catalog.py`` reads it, ``own.py`` describes our own keys,
``lookup.py`` finds, ``show.py`` prints. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Explain each of ``arguments``, or say how to ask.

    Raises:
        UserError: a key that neither we nor any of the systems have, with the nearest that exists.
    """
    from embodied_rl.explain.catalog import load_entries
    from embodied_rl.explain.lookup import Index
    from embodied_rl.explain.own import own_groups, own_keys
    from embodied_rl.explain.show import console, show_answer, show_usage

    queries = [argument for argument in arguments if argument not in ("-h", "--help")]
    index = Index(load_entries(), own_keys(), own_groups())
    output = console()
    if not queries:
        show_usage(output, index)
    for answer in [index.answer(query) for query in queries]:
        show_answer(output, index, answer)
