"""Peers as oracles: our functions and those of published packages on the same inputs (``docs/peers.md``).

``theirs*.py`` run in the peers' environment (``setup.sh``), import none of the project's code and hand back tensors.
"""
