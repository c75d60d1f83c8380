from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from embodied_rl.channel.codec import _fields, decode, encode
from embodied_rl.contracts import EnvObs, RolloutStart

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128, torch.complex32,
)  # fmt: skip


def roundtrip(item: Any) -> Any:
    encoded = encode(item)
    memory = np.full(encoded.nbytes + 100, 0xAB, np.uint8)
    encoded.write(memory)
    assert (memory[encoded.nbytes :] == 0xAB).all(), "wrote past the end"
    received = decode(memory)
    memory[:] = 0xCD  # what was received must not live in there
    return received


def bits(tensor: torch.Tensor) -> bytes:
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype)
    dense.view(tensor.shape).copy_(tensor)
    return dense.view(torch.uint8).numpy().tobytes()


def counting(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Different bytes everywhere (0 and 1 for bool)."""
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.arange(1, size + 1).to(torch.uint8)
    return (raw % 2).to(torch.bool).view(shape) if dtype is torch.bool else raw.view(dtype).view(shape)


@settings(deadline=None, max_examples=150)
@given(
    dtype=st.sampled_from(DTYPES),
    # From empty to tens of thousands of bytes, on both sides of what is a block of its own.
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple) | st.tuples(st.integers(30, 60), st.integers(30, 60)),
    data=st.data(),
)
def test_tensors_of_any_dtype_shape_and_stride(dtype: torch.dtype, shape: tuple[int, ...], data: st.DataObject) -> None:
    tensor = counting(dtype, shape)
    if shape:
        tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
        step = data.draw(st.integers(1, 3))
        tensor = tensor[::step]
    received = roundtrip({"x": (tensor,)})["x"][0]
    assert received.dtype is tensor.dtype and received.shape == tensor.shape
    assert bits(received) == bits(tensor)


@settings(deadline=None, max_examples=150)
@given(hnp.arrays(hnp.array_dtypes() | hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0)), st.booleans())
def test_arrays_of_any_dtype_shape_and_order(array: np.ndarray, transpose: bool) -> None:
    array = array.T if transpose else array
    received = roundtrip([array])[0]
    assert received.dtype == array.dtype and received.shape == array.shape
    assert received.tobytes() == array.tobytes()


def test_object_arrays_and_strided_structured_arrays() -> None:
    assert roundtrip(np.array([{"a": 1}, None], dtype=object)).tolist() == [{"a": 1}, None]
    record = np.rec.array([(1, 2.5)], dtype=[("step", "i4"), ("reward", "f8")])
    assert type(roundtrip(record)) is np.recarray and roundtrip(record).reward.tolist() == [2.5]
    structured = np.array([(i, i / 2) for i in range(6)], dtype=[("step", "i4"), ("reward", "f8")])[::2]
    np.testing.assert_array_equal(roundtrip(structured), structured)
    assert roundtrip(np.datetime64("2024-02-29")) == np.datetime64("2024-02-29")


def test_large_tensors_and_arrays() -> None:
    tensor = torch.arange(300_000).view(300, 1000)
    received = roundtrip({"plain": tensor, "transposed": tensor.T, "array": tensor.numpy()[::2]})
    assert torch.equal(received["plain"], tensor) and torch.equal(received["transposed"], tensor.T)
    np.testing.assert_array_equal(received["array"], tensor.numpy()[::2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    name: str
    parts: tuple[Any, ...]


def test_contract_messages_and_nested_dataclasses() -> None:
    obs = EnvObs(
        env_ids=torch.tensor([3, 4]),
        images={"agentview": torch.arange(2 * 4 * 4 * 3).to(torch.uint8).view(2, 4, 4, 3)},
        state=torch.tensor([[1.5], [2.5]]),
        instructions=("open the drawer", "schließe die Schublade"),
    )
    message = Nested(
        name="outer", parts=(RolloutStart(obs=obs), Nested(name="inner", parts=(None, 1, [2.5, {"k": b"v"}])))
    )
    received = roundtrip(message)
    assert received.parts[1] == message.parts[1] and received.name == "outer"
    got = received.parts[0].obs
    assert got.env_ids.tolist() == [3, 4] and got.instructions == obs.instructions
    assert torch.equal(got.images["agentview"], obs.images["agentview"]) and torch.equal(got.state, obs.state)


@dataclass(frozen=True, slots=True)
class Reduced:
    """Is pickled in its own way."""

    number: int

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return Reduced, (self.number + 1,)


def test_a_dataclass_with_slots_is_sent_by_its_fields_alone() -> None:
    """And is not checked once more by its constructor; one that says itself how it is pickled is left to that."""
    broken = EnvObs(env_ids=torch.arange(1), images={}, state=torch.ones(1, 1), instructions=("go",))
    object.__setattr__(broken, "instructions", ())
    assert roundtrip(broken).instructions == ()
    assert roundtrip(Reduced(1)) == Reduced(2)
    assert _fields(EnvObs) == ("env_ids", "images", "state", "instructions")
    assert _fields(Reduced) is None and _fields(dict) is None


def test_received_memory_is_owned_and_writable() -> None:
    sent = torch.ones(3)
    read_only = np.ones(3)
    read_only.flags.writeable = False
    tensor, array, broadcast = roundtrip((sent, read_only, np.broadcast_to(np.float32(2), (2, 2))))
    tensor += 1
    array += 1
    broadcast[0, 0] = 5
    assert sent.tolist() == [1, 1, 1] and tensor.tolist() == [2, 2, 2]
    assert read_only.tolist() == [1, 1, 1] and broadcast.tolist() == [[5, 2], [2, 2]]


def test_parameters_arrive_as_plain_tensors_without_gradient() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    received = roundtrip([parameter, parameter * 2, parameter.detach().requires_grad_().bfloat16()])
    assert [type(tensor) for tensor in received] == [torch.Tensor] * 3
    assert not any(tensor.requires_grad for tensor in received)
    assert received[0].tolist() == [1, 2] and received[1].tolist() == [2, 4] and received[2].tolist() == [1, 2]


def test_conjugate_and_negative_views_are_resolved() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    conjugate, imaginary = roundtrip((z.conj(), z.conj().imag))
    assert conjugate.tolist() == [1 - 2j, 3 + 4j] and imaginary.tolist() == [-2, 4]


def test_a_tensor_sent_twice_in_a_message_is_written_once() -> None:
    tensor = torch.zeros(10_000)
    assert encode([tensor, tensor]).nbytes < 2 * tensor.nbytes
    first, second = roundtrip([tensor, tensor])
    assert first is second


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (torch.empty(2, device="meta"), "on device meta: move it with .cpu()"),
        (torch.eye(2).to_sparse(), "of layout torch.sparse_coo and dtype torch.float32: make it dense"),
        (lambda: None, "A message is made of dense CPU tensors"),
        ((i for i in range(2)), "cannot pickle 'generator' object"),
    ],
)
def test_what_cannot_be_sent_is_named(item: Any, text: str) -> None:
    with pytest.raises(TypeError, match="this dict cannot be sent") as error:
        encode({"x": item})
    assert text in str(error.value)
