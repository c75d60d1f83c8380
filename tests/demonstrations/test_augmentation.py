"""Changes of images, computed by hand, and of words."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_rl.demonstrations.augmentation import augment, jitter, reword, shift
from embodied_rl.schema import AugmentationConfig

OFF = AugmentationConfig(random_shift=0, brightness=0.0, contrast=0.0, saturation=0.0, words=0.0)
ALL = AugmentationConfig(random_shift=2, brightness=0.3, contrast=0.3, saturation=0.3, words=0.0)


def pictures(n: int = 6, size: int = 8, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, size, size, 3), dtype=torch.uint8, generator=generator)


def changed(
    images: dict[str, Tensor],
    config: AugmentationConfig,
    *,
    seed: int = 0,
    step: int = 0,
    positions: list[int] | None = None,
) -> dict[str, Tensor]:
    n = len(next(iter(images.values())))
    return augment(
        images, config, seed=seed, step=step, positions=torch.tensor(positions or list(range(n))), batch_size=16
    )


def test_off_is_the_image_itself() -> None:
    image = pictures()
    assert changed({"cam": image}, OFF)["cam"] is image


def test_shift_by_hand() -> None:
    image = torch.arange(9, dtype=torch.uint8).reshape(1, 3, 3, 1).expand(-1, -1, -1, 3)
    down = shift(image, torch.tensor([[1, 0]]))[0, :, :, 0]
    assert down.tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    up_right = shift(image, torch.tensor([[-1, 2]]))[0, :, :, 0]
    assert up_right.tolist() == [[3, 3, 3], [6, 6, 6], [6, 6, 6]]


def test_jitter_by_hand() -> None:
    # Two pixels of grey 100 and 200: mean grey 150.
    greys = torch.tensor([100, 200], dtype=torch.uint8).reshape(1, 1, 2, 1).expand(-1, -1, -1, 3)
    ones = [1.0, 1.0, 1.0]
    assert jitter(greys, torch.tensor([ones])).tolist() == greys.tolist()
    assert jitter(greys, torch.tensor([[1.2, 1.0, 1.0]]))[0, 0, :, 0].tolist() == [120, 240]
    assert jitter(greys, torch.tensor([[1.5, 1.0, 1.0]]))[0, 0, :, 0].tolist() == [150, 255]
    assert jitter(greys, torch.tensor([[1.0, 0.5, 1.0]]))[0, 0, :, 0].tolist() == [125, 175]
    red = torch.tensor([200, 0, 0], dtype=torch.uint8).reshape(1, 1, 1, 3)
    # Grey 0.299 * 200 = 59.8; half of the way there from 200 is 129.9, from 0 is 29.9.
    assert jitter(red, torch.tensor([[1.0, 1.0, 0.5]])).flatten().tolist() == [130, 30, 30]


def test_every_sample_is_changed_in_its_own_way_and_within_bounds() -> None:
    size, limit = 32, 3
    config = AugmentationConfig(random_shift=limit, brightness=0.0, contrast=0.0, saturation=0.0, words=0.0)
    marks = torch.zeros(16, size, size, 3, dtype=torch.uint8)
    marks[:, 16, 16] = 255
    seen = set()
    for step in range(40):
        moved = changed({"cam": marks}, config, step=step)["cam"]
        seen |= {tuple((at - 16).tolist()) for at in moved[..., 0].nonzero()[:, 1:]}
    offsets = range(-limit, limit + 1)
    assert seen == {(row, column) for row in offsets for column in offsets}


def test_what_is_drawn_depends_on_seed_step_and_place_alone() -> None:
    image = pictures(16)
    whole = changed({"cam": image}, ALL)["cam"]
    part = changed({"cam": image[[3, 9]]}, ALL, positions=[3, 9])["cam"]
    assert torch.equal(part, whole[[3, 9]]), "two workers change what one would have"
    assert torch.equal(changed({"cam": image}, ALL)["cam"], whole)
    assert not torch.equal(changed({"cam": image}, ALL, seed=1)["cam"], whole)
    assert not torch.equal(changed({"cam": image}, ALL, step=1)["cam"], whole)


def test_cameras_share_colours_and_not_shifts() -> None:
    image = pictures(16)
    colours = AugmentationConfig(random_shift=0, brightness=0.3, contrast=0.3, saturation=0.3, words=0.0)
    both = changed({"left": image, "right": image}, colours)
    assert torch.equal(both["left"], both["right"])
    assert not torch.equal(both["left"], image)
    moved = changed({"left": image, "right": image}, ALL)
    assert not torch.equal(moved["left"], moved["right"])


SAID = ("put the bowl on the plate",) * 400


def reworded(share: float, positions: list[int] | None = None, *, seed: int = 0, step: int = 0) -> tuple[str, ...]:
    at = positions or list(range(len(SAID)))
    said = [SAID[i] for i in at]
    return reword(said, share, seed=seed, step=step, positions=torch.tensor(at), batch_size=len(SAID))


def test_words_stay_where_nothing_is_asked_for() -> None:
    assert reworded(0.0) == SAID


def test_half_of_the_changed_words_are_left_out_and_half_made_up() -> None:
    words = [said.split() for said in reworded(0.4)]
    known = set(SAID[0].split())
    left_out = sum(6 - len(said) for said in words) / (6 * len(words))
    made_up = sum(word not in known for said in words for word in said) / (6 * len(words))
    # One of six words stays in any case: 0.2 * 5 / 6 of each, with a standard deviation of 0.008.
    assert abs(left_out - 0.167) < 0.03 and abs(made_up - 0.167) < 0.03
    assert len({word for said in words for word in said} - known) > 300, "none is heard often"


def test_a_word_stays_in_any_case() -> None:
    known = set(SAID[0].split())
    for said in reworded(1.0):
        assert len(known & set(said.split())) == 1
    assert reword(["open"], 1.0, seed=0, step=0, positions=torch.tensor([0]), batch_size=1) == ("open",)


def test_words_depend_on_seed_step_and_place_alone() -> None:
    everything = reworded(0.5)
    assert reworded(0.5, [7, 3, 399]) == tuple(everything[i] for i in (7, 3, 399))
    assert reworded(0.5, step=1) != everything != reworded(0.5, seed=1)
