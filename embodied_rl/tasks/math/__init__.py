"""``task=math``: a language model learns from the scores of its answers; ``task=sft``: it imitates demonstrations."""
