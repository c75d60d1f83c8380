"""A page for every run: what it was, what it reached, and where its time went, in one HTML file."""
