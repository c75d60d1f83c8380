"""How well a policy does: success tables with intervals, eval.json, videos."""
