"""Channels carry messages between workers: ``in_process`` in one process, ``shared_memory`` between those of one node,
``network`` between nodes.
"""
