"""Tasks of a run, a folder each or for two that are alike, and the parts of the loop that they share."""
