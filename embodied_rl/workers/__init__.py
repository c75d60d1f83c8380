"""What runs where: env, rollout and actor workers."""
