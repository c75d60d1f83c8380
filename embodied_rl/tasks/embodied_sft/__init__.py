"""``task=embodied_sft``: a policy imitates recorded episodes."""
