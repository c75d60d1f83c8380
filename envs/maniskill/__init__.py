"""ManiSkill: GPU-parallel robot tasks on SAPIEN."""
