"""``task=dagger``: imitation that is shown the way back from where it leads."""
