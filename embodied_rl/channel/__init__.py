"""Channels carry messages between workers: :class:`InProcessChannel` in one process, :class:`SharedMemoryChannel`
between the processes of one node. A channel across nodes is one more file that implements :class:`Channel`."""

from embodied_rl.channel.base import Channel, ChannelClosed, ChannelTimeout
from embodied_rl.channel.in_process import InProcessChannel
from embodied_rl.channel.shared_memory import SharedMemoryChannel

__all__ = ["Channel", "ChannelClosed", "ChannelTimeout", "InProcessChannel", "SharedMemoryChannel"]
