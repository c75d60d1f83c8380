"""Policies that sample actions by flow matching: their sampler, heads and published folders."""
