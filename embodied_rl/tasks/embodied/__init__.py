"""``task=embodied``: a policy learns by acting in simulators."""
