"""Evaluation of a policy: success tables with intervals, eval.json, comparisons, videos."""
