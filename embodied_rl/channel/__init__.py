"""Channels carry messages between workers: ``in_process`` in one process, ``shared_memory`` between those of one node.

A channel across nodes is one more file that implements :class:`~embodied_rl.channel.base.Channel`.
"""
