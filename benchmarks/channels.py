"""How fast messages pass between two processes: our channel, a plain copy, and other transports.

    python -m benchmarks.channels [--quick] [--json FILE]

Every transport is measured in each of several rounds, one after the other, so that all meet the same load of the
machine; the table shows the median of the rounds. What is received must be the receiver's own: a transport that hands
out shared memory is charged for the copy out of it, as the channel is; where the channel's receiver reads in place
instead, it reads every byte. RLinf's channel, a worker of Ray between two others, comes last, in turn with ours alone,
and with a tenth of the small messages. It is in the peers' environment (``benchmarks/peers/setup.sh``).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import itertools
import json
import multiprocessing as mp
import os
import pickle
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.peers import environment
from benchmarks.peers.messages import (
    IN_FLIGHT,
    LARGE_BYTES,
    LARGE_PARTS,
    SMALL_BYTES,
    large_message,
    small_message,
)
from embodied_rl.channel.base import run_blocking
from embodied_rl.channel.shared_memory import SharedMemoryChannel

Message = dict[str, torch.Tensor]

SPAWN = mp.get_context("spawn")


class Transport(Protocol):
    """One direction between two processes. It is made by one and passed to the other as an argument of ``Process``."""

    def send(self, message: Message) -> None: ...
    def receive(self) -> Message: ...


class OurChannel:
    def __init__(self) -> None:
        self.channel = SharedMemoryChannel("benchmark", [0], IN_FLIGHT, SPAWN)

    def send(self, message: Message) -> None:
        run_blocking(self.channel.put(message))

    def receive(self) -> Message:
        return run_blocking(self.channel.get())


class InPlace(OurChannel):
    """The channel, whose receiver reads each message where it is: here it adds up all of its bytes."""

    def receive(self) -> Message:
        return run_blocking(self.channel.read(_digest))


def _digest(message: Message) -> Message:
    return {name: tensor.view(torch.int64).sum() for name, tensor in message.items()}


def _dumps(message: Message) -> bytes:
    return pickle.dumps({name: tensor.numpy() for name, tensor in message.items()}, protocol=5)


def _loads(data: bytes) -> Message:
    return {name: torch.from_numpy(array) for name, array in pickle.loads(data).items()}


class Pipe:
    """Pickle protocol 5 through ``multiprocessing.Pipe``."""

    def __init__(self) -> None:
        self.reader, self.writer = SPAWN.Pipe(duplex=False)

    def send(self, message: Message) -> None:
        self.writer.send_bytes(_dumps(message))

    def receive(self) -> Message:
        return _loads(self.reader.recv_bytes())


class FasterFifo:
    def __init__(self) -> None:
        import faster_fifo  # pyright: ignore[reportMissingImports]
        import faster_fifo_reduction  # noqa: F401  # pyright: ignore[reportMissingImports]

        self.queue = faster_fifo.Queue(
            max_size_bytes=IN_FLIGHT * (LARGE_BYTES + 2**16), maxsize=IN_FLIGHT, dumps=_dumps, loads=_loads
        )

    def send(self, message: Message) -> None:
        self.queue.put(message, timeout=60)

    def receive(self) -> Message:
        return self.queue.get(timeout=60)


class TorchQueue:
    """Tensors moved to shared memory by ``torch.multiprocessing``; the sender keeps its own, so it sends clones."""

    def __init__(self) -> None:
        self.queue = torch.multiprocessing.get_context("spawn").Queue(IN_FLIGHT)

    def send(self, message: Message) -> None:
        self.queue.put({name: tensor.clone() for name, tensor in message.items()})

    def receive(self) -> Message:
        return {name: tensor.clone() for name, tensor in self.queue.get().items()}


class SharedMemoryQueue:
    """Named segments, and queues that say which of them are free and what is in the others."""

    def __init__(self) -> None:
        self.free, self.filled = SPAWN.Queue(), SPAWN.Queue()
        self.segments = [SharedMemory(create=True, size=LARGE_BYTES + 2**16) for _ in range(IN_FLIGHT)]
        for index in range(IN_FLIGHT):
            self.free.put(index)

    def send(self, message: Message) -> None:
        index, place, parts = self.free.get(), 0, []
        for name, tensor in message.items():
            target = torch.frombuffer(self.segments[index].buf, dtype=tensor.dtype, count=tensor.numel(), offset=place)
            target.copy_(tensor.view(-1))
            parts.append((name, tensor.dtype, tuple(tensor.shape), place))
            place += tensor.nbytes
        self.filled.put((index, parts))

    def receive(self) -> Message:
        index, parts = self.filled.get()
        message = {}
        for name, dtype, shape, place in parts:
            count = torch.Size(shape).numel()
            source = torch.frombuffer(self.segments[index].buf, dtype=dtype, count=count, offset=place)
            message[name] = source.view(shape).clone()
        self.free.put(index)
        return message


class Iceoryx2:
    """Pickle protocol 5 in samples of iceoryx2; its events wake the receiver."""

    def __init__(self) -> None:
        self.service = f"embodied_rl_benchmark_{os.getpid()}_{id(self)}"
        self.sender: tuple[Any, ...] | None = None
        self.receiver: tuple[Any, ...] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"service": self.service, "sender": None, "receiver": None}

    def _services(self) -> tuple[Any, Any, Any]:
        import iceoryx2 as iox  # pyright: ignore[reportMissingImports]

        iox.set_log_level(iox.LogLevel.Error)
        node = iox.NodeBuilder.new().create(iox.ServiceType.Ipc)
        data = (
            node.service_builder(iox.ServiceName.new(self.service))
            .publish_subscribe(iox.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(IN_FLIGHT)
            .open_or_create()
        )
        event = node.service_builder(iox.ServiceName.new(self.service)).event().open_or_create()
        return node, data, event

    def _open_sender(self) -> tuple[Any, ...]:
        import iceoryx2 as iox  # pyright: ignore[reportMissingImports]

        node, data, event = self._services()
        publisher = (
            data.publisher_builder()
            .initial_max_slice_len(LARGE_BYTES + 2**16)
            .backpressure_strategy(iox.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        while not (data.dynamic_config.number_of_subscribers and event.dynamic_config.number_of_listeners):
            time.sleep(0.01)
        return publisher, event.notifier_builder().create(), node, data, event

    def send(self, message: Message) -> None:
        if self.sender is None:
            self.sender = self._open_sender()
        publisher, notifier, *_ = self.sender
        buffers: list[pickle.PickleBuffer] = []
        arrays = {name: tensor.numpy() for name, tensor in message.items()}
        parts = [pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append), *(b.raw() for b in buffers)]
        sizes = np.array([len(part) for part in parts], np.uint64).tobytes()
        sample = publisher.loan_slice_uninit(8 + len(sizes) + sum(len(part) for part in parts))
        payload = sample.payload()
        memory = (ctypes.c_uint8 * payload.len()).from_address(payload.as_ptr())
        view, place = memoryview(memory).cast("B"), 0
        for part in (len(parts).to_bytes(8, "little"), sizes, *parts):
            view[place : place + len(part)] = part
            place += len(part)
        sample.assume_init().send()
        notifier.notify()

    def receive(self) -> Message:
        if self.receiver is None:
            node, data, event = self._services()
            listener = event.listener_builder().create()
            self.receiver = data.subscriber_builder().create(), listener, node, data, event
        subscriber, listener, *_ = self.receiver
        while (sample := subscriber.receive()) is None:
            listener.blocking_wait()
        payload = sample.payload()
        view = memoryview((ctypes.c_uint8 * payload.len()).from_address(payload.as_ptr())).cast("B")
        count = int.from_bytes(view[:8], "little")
        sizes = np.frombuffer(view[8 : 8 + 8 * count], np.uint64).tolist()
        ends = np.cumsum([8 + 8 * count, *sizes]).tolist()
        stream, *blocks = (view[start:end] for start, end in itertools.pairwise(ends))
        arrays = pickle.loads(stream, buffers=[bytearray(block) for block in blocks])
        sample.delete()
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


OURS, IN_PLACE, PIPE = "embodied_rl SharedMemoryChannel", "the same, read in place", "multiprocessing.Pipe, pickle 5"
RLINF, BESIDE = "RLinf's Channel", "embodied_rl, in turn with RLinf"
OF_ITS_OWN = {
    "RAY_ADDRESS": "local",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RLINF_COMM_NET_DEVICES": "lo",
    "RLINF_LOG_LEVEL": "WARNING",
}
"""RLinf starts a Ray of its own instead of joining one that is there, and all stays on 127.0.0.1, as is Ray's default
on those two systems."""
TRANSPORTS: dict[str, tuple[Callable[[], Transport], str | None]] = {
    OURS: (OurChannel, None),
    IN_PLACE: (InPlace, None),
    PIPE: (Pipe, None),
    "torch.multiprocessing queue": (TorchQueue, None),
    "shared_memory + Queue of descriptors": (SharedMemoryQueue, None),
    "iceoryx2": (Iceoryx2, "iceoryx2"),
    "faster-fifo": (FasterFifo, "faster_fifo"),
}
"""Name -> (constructor, the module it needs)."""


def peer(requests: Transport, answers: Transport, control: Connection) -> None:
    """Obey ("take", n): receive n messages, then answer; ("echo", n): answer each of n messages with itself."""
    torch.set_num_threads(1)
    while (order := control.recv()) is not None:
        action, count = order
        for _ in range(count):
            message = requests.receive()
            if action == "echo":
                answers.send(message)
        control.send("done")


class Measurement:
    """One transport between this process and a peer, alive for all rounds."""

    def __init__(self, make: Callable[[], Transport]) -> None:
        self.requests, self.answers = make(), make()
        self.control, theirs = SPAWN.Pipe()
        self.peer = SPAWN.Process(target=peer, args=(self.requests, self.answers, theirs), daemon=True)
        self.peer.start()
        self.large, self.small = large_message(), small_message()
        self.throughput(4)
        self.latency(50)

    def throughput(self, count: int) -> float:
        """Bytes a second of large messages."""
        self.control.send(("take", count))
        started = time.perf_counter()
        for _ in range(count):
            self.requests.send(self.large)
        self.control.recv()
        return count * LARGE_BYTES / (time.perf_counter() - started)

    def latency(self, count: int) -> float:
        """Median seconds of a small message's way there and back."""
        self.control.send(("echo", count))
        times = []
        for _ in range(count):
            started = time.perf_counter()
            self.requests.send(self.small)
            self.answers.receive()
            times.append(time.perf_counter() - started)
        self.control.recv()
        return statistics.median(times)

    def finish(self) -> None:
        self.control.send(None)
        self.peer.join(10)
        self.peer.kill()
        for transport in (self.requests, self.answers):
            if isinstance(transport, SharedMemoryQueue):
                for segment in transport.segments:
                    segment.unlink()


class RLinf:
    """The same measurements by ``peers/rlinf_channel.py`` in its own environment, alive for all rounds."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [environment.PYTHON, "-W", "ignore", "-m", "benchmarks.peers.rlinf_channel"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **OF_ITS_OWN, "OMP_NUM_THREADS": "1"},
        )
        self.throughput(4)
        self.latency(50)

    def throughput(self, count: int) -> float:
        return self._ask("throughput", count)

    def latency(self, count: int) -> float:
        return self._ask("latency", count)

    def _ask(self, what: str, count: int) -> float:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{what}\t{count}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("answer\t"):
                return float(line.partition("\t")[2])
        raise RuntimeError("RLinf's process ended; its message is above")

    def finish(self) -> None:
        self.process.communicate(timeout=60)


def copy_rate(count: int) -> float:
    """Bytes a second of a plain copy of the large message's tensors, memory allocated and touched before."""
    source, target = large_message(), large_message()
    started = time.perf_counter()
    for _ in range(count):
        for name, tensor in source.items():
            target[name].copy_(tensor)
    return count * LARGE_BYTES / (time.perf_counter() - started)


def measure(rounds: int, large: int, small: int) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {"plain copy (torch copy_)": {"bytes_per_second": [], "of_copy": []}}
    running = {}
    for name, (make, module) in TRANSPORTS.items():
        if module is not None and importlib.util.find_spec(module) is None:
            results[name] = {"missing": f"not importable here: {module}"}
        else:
            results[name], running[name] = {}, Measurement(make)
    alternate(running, results, rounds, large, small)
    if environment.exists():  # not before, since Ray's processes work a little while they wait
        pair = {BESIDE: running[OURS], RLINF: RLinf()}
        alternate(pair, results, rounds, large, max(1, small // 10))
        pair[RLINF].finish()
    else:
        results[RLINF] = {"missing": environment.HOW_TO_MAKE}
    for measurement in running.values():
        measurement.finish()
    return results


def alternate(
    running: Mapping[str, Measurement | RLinf], results: dict[str, dict[str, Any]], rounds: int, large: int, small: int
) -> None:
    """Add what each round gives to ``results``."""
    for name in running:
        results[name] = {"bytes_per_second": [], "of_copy": [], "round_trip_seconds": []}
    for _ in range(rounds):
        for name, measurement in running.items():
            before = copy_rate(large)
            rate = measurement.throughput(large)
            # The mean of a copy before and one after, since the load of a shared machine changes.
            copy = (before + copy_rate(large)) / 2
            results["plain copy (torch copy_)"]["bytes_per_second"].append(copy)
            results[name]["bytes_per_second"].append(rate)
            results[name]["of_copy"].append(rate / copy)
            results[name]["round_trip_seconds"].append(measurement.latency(small))


def compared(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    ours, in_place, pipe = (results[name] for name in (OURS, IN_PLACE, PIPE))
    ratios = {
        "bytes/s by a plain copy's": statistics.median(ours["of_copy"]),
        "bytes/s by a plain copy's, read in place": statistics.median(in_place["of_copy"]),
        "a pipe's round trip by the channel's": _median_trip(pipe) / _median_trip(ours),
    }
    if BESIDE in results:
        beside, rlinf = results[BESIDE], results[RLINF]
        rates = zip(beside["bytes_per_second"], rlinf["bytes_per_second"], strict=True)
        ratios["bytes/s by RLinf's channel's"] = statistics.median(own / other for own, other in rates)
        ratios["RLinf's channel's round trip by the channel's"] = _median_trip(rlinf) / _median_trip(beside)
    return ratios


def _median_trip(numbers: dict[str, Any]) -> float:
    return statistics.median(numbers["round_trip_seconds"])


def show(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=f"{LARGE_BYTES >> 20} MiB in {LARGE_PARTS} tensors; {SMALL_BYTES >> 10} KiB there and back")
    table.add_column("transport")
    for column in ("GiB/s", "of a plain copy", "median round trip, ms", "best round"):
        table.add_column(column, justify="right")
    for name, numbers in results.items():
        if "missing" in numbers:
            table.add_row(name, numbers["missing"], "", "", "")
            continue
        rate, share, trip = (numbers.get(key) for key in ("bytes_per_second", "of_copy", "round_trip_seconds"))
        table.add_row(
            name,
            f"{statistics.median(rate) / 2**30:.2f}" if rate else "",
            f"{statistics.median(share):.0%}" if share else "",
            f"{statistics.median(trip) * 1e3:.3f}" if trip else "",
            f"{min(trip) * 1e3:.3f}" if trip else "",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.channels", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write every round's numbers there")
    parser.add_argument("--quick", action="store_true", help="a few seconds, rougher numbers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds, large, small = (3, 20, 200) if arguments.quick else (15, 60, 1000)
    results = measure(rounds, large, small)
    Console().print(show(results))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
