"""Engines that complete prompts, behind one interface."""
