"""``task=collect``: an expert or a policy plays, and its episodes become a data set."""
