"""``task=sft``: a language model imitates demonstrations."""
