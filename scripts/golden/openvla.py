"""Run the code of OpenVLA or OpenVLA-OFT on small inputs and store what comes out in tests/models/openvla/golden.

The tests compare this project with those files. Needs neither the project nor its environment but Python 3.10 and git::

    python3.10 -m venv upstream && upstream/bin/pip install -r scripts/golden/openvla.txt
    git clone https://github.com/openvla/openvla && git -C openvla checkout c8f03f48
    git clone https://github.com/moojink/openvla-oft && git -C openvla-oft checkout 213c5ff8
    git clone https://github.com/moojink/transformers-openvla-oft && git -C transformers-openvla-oft checkout bc339d9a
    upstream/bin/python scripts/golden/openvla.py openvla openvla
    upstream/bin/python scripts/golden/openvla.py openvla_oft openvla-oft --transformers transformers-openvla-oft

Runs on the CPU in a minute, without network; a second run writes the same bytes (but for the date). No line of upstream
is copied: both repositories are under the MIT licence, transformers under Apache 2.0; what is stored are numbers.

Three things are not as upstream does them: networks are small and in float32 instead of bfloat16; OpenVLA-OFT's image
size is 28 where the network is run; and packages that only training or the simulator needs are stand-ins.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ |= {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}

import numpy as np
import record

sys.path.insert(0, str(record.TESTS / "openvla"))
import golden_inputs as given

PACKAGES = ("numpy", "pillow", "tensorflow-cpu", "timm", "tokenizers", "torch", "torchvision", "transformers")
REPOSITORIES = {"openvla": "openvla/openvla", "openvla_oft": "moojink/openvla-oft"}
KEY = "libero_10_no_noops"
ROWS = (0, 1)
"""Observations; their prompts are of different lengths."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=REPOSITORIES)
    parser.add_argument("source", type=Path, help="a git checkout of the variant's repository")
    parser.add_argument("--transformers", type=Path, help="openvla_oft's: a checkout of its fork of transformers")
    parser.add_argument("--out", type=Path, default=record.TESTS / "openvla/golden")
    arguments = parser.parse_args()
    sources = [{**record.checkout(arguments.source, REPOSITORIES[arguments.variant]), "licence": "MIT"}]
    sys.path.insert(0, str(arguments.source))
    if (arguments.variant == "openvla_oft") != (arguments.transformers is not None):
        parser.error("--transformers goes with openvla_oft, whose attention is in that fork")
    if arguments.transformers is not None:
        fork = record.checkout(arguments.transformers, "moojink/transformers-openvla-oft")
        sources.append({**fork, "licence": "Apache-2.0"})
        sys.path.insert(0, str(arguments.transformers / "src"))
    record.StandIn("libero", "wandb", "dlimp", "tensorflow_datasets", "tensorflow_graphics")

    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    facts, tensors = {"openvla": run_openvla, "openvla_oft": run_oft}[arguments.variant]()
    record.write(arguments.out, arguments.variant, sources, PACKAGES, facts, tensors)


def run_openvla() -> tuple[dict[str, Any], dict[str, Any]]:
    import torch
    from experiments.robot import robot_utils
    from experiments.robot.libero import libero_utils
    from prismatic.vla.action_tokenizer import ActionTokenizer

    # Asked only for the vocabulary's size; the ids themselves instead of their text.
    tokenizer = SimpleNamespace(vocab_size=32000, decode=lambda ids: [int(i) for i in ids])
    codec = ActionTokenizer(tokenizer)
    tensors = {
        f"resized.{name}": _sampled(libero_utils.resize_image(given.picture(name, height, width), (side, side)))
        for name, (height, width, side) in given.RESIZED.items()
    }
    tensors["decoded_tokens"] = codec.decode_token_ids_to_actions(given.tokens())

    network = build_network({"bos_token_id": 1, "eos_token_id": 2})
    network.norm_stats = given.STATISTICS
    processor, texts, prompts = Processor(), [], []
    logits, unnormalized, executed = [], [], []
    forward = network.forward

    def recorded(input_ids: Any, **kwargs: Any) -> Any:
        output = forward(input_ids, **kwargs)
        if input_ids.shape[1] > 1:  # a prompt, not the token before
            prompts.append(input_ids[0].tolist())
        logits.append(output.logits[0, -1, 31744:32000])
        return output

    network.forward = recorded
    config = SimpleNamespace(model_family="openvla", pretrained_checkpoint="openvla", unnorm_key=KEY, center_crop=False)
    for row in ROWS:
        observation = {"full_image": given.images(row)["wrist"]}
        action = robot_utils.get_action(config, network, observation, given.INSTRUCTIONS[row], processor)
        unnormalized.append(action.copy())
        action = robot_utils.normalize_gripper_action(action, binarize=True)
        executed.append(robot_utils.invert_gripper_action(action))
    tensors |= {
        "logits": torch.stack(logits).view(len(ROWS), 7, 256).numpy(),
        "unnormalized": np.stack(unnormalized),
        "executed": np.stack(executed),
        "pixel_values": processor.seen[0]["pixel_values"][0].numpy(),
    }
    config.center_crop = True
    robot_utils.get_action(config, network, {"full_image": given.picture("cropped", 224, 224)}, "open", processor)
    tensors["cropped"] = _sampled(processor.seen[-1]["image"])
    config.center_crop = False
    for text in given.INSTRUCTIONS:
        robot_utils.get_action(config, network, {"full_image": given.images(0)["wrist"]}, text, processor)
        texts.append(processor.seen[-1]["text"])
    facts = {
        "prompts": texts,
        "token_ids": prompts[-len(texts) :],
        "bins": [32000 - token for token in codec(given.actions())],
        "layout": {"small": shapes(network), "full": record.folded(shapes(build_network({}, full=True)))},
    }
    return facts, tensors


def run_oft() -> tuple[dict[str, Any], dict[str, Any]]:
    import torch
    from experiments.robot import openvla_utils, robot_utils
    from experiments.robot.libero import run_libero_eval
    from prismatic.models.action_heads import L1RegressionActionHead
    from prismatic.models.projectors import ProprioProjector

    tensors = {}
    for name, (height, width, side) in given.RESIZED.items():
        resized = openvla_utils.resize_image_for_policy(given.picture(name, height, width), side)
        openvla_utils.OPENVLA_IMAGE_SIZE = side
        [cut] = openvla_utils.prepare_images_for_vla([resized], SimpleNamespace(center_crop=True))
        tensors |= {f"resized.{name}": _sampled(resized), f"prepared.{name}": _sampled(np.asarray(cut))}
    openvla_utils.OPENVLA_IMAGE_SIZE = given.IMAGE

    network = build_network({"bos_token_id": 1, "eos_token_id": 2})
    network.norm_stats = given.STATISTICS
    unnormalized = network._unnormalize_actions(given.normalized_actions(), KEY)
    tensors |= {
        "unnormalized": unnormalized,
        "executed": np.stack([run_libero_eval.process_action(action, "openvla") for action in unnormalized]),
        "proprio": np.stack(
            [openvla_utils.normalize_proprio(given.state(row), given.STATISTICS[KEY]["proprio"]) for row in range(4)]
        ),
    }
    width = network.llm_dim
    head = filled(L1RegressionActionHead(input_dim=width, hidden_dim=width, action_dim=7), "action_head")
    projector = filled(ProprioProjector(llm_dim=width, proprio_dim=8), "proprio_projector")
    outputs: list[Any] = []
    predict = network.predict_action

    def recorded(**kwargs: Any) -> Any:
        outputs.append(predict(**kwargs))
        return outputs[-1]

    network.predict_action = recorded
    processor = Processor()
    for cameras, use_head in ((1, False), (2, False), (1, True), (2, True)):
        name = f"{'l1' if use_head else 'discrete'}_{cameras}"
        network.vision_backbone.set_num_images_in_input(cameras)
        config = SimpleNamespace(
            model_family="openvla", num_images_in_input=cameras, center_crop=True, use_proprio=use_head, unnorm_key=KEY
        )
        first, states, executed = len(outputs), [], []
        processor.seen.clear()
        for row in ROWS:
            observation, _ = run_libero_eval.prepare_observation(given.simulated(row), given.IMAGE)
            states.append(observation["state"])
            parts = (head, projector) if use_head else (None, None)
            chunk = robot_utils.get_action(
                config,
                network,
                observation,
                given.INSTRUCTIONS[row],
                processor=processor,
                action_head=parts[0],
                proprio_projector=parts[1],
            )
            executed.append(np.stack([run_libero_eval.process_action(action, "openvla") for action in chunk]))
        tensors[f"{name}.executed"] = np.stack(executed)
        tensors[f"{name}.hidden"] = torch.cat([hidden for _, hidden in outputs[first:]]).numpy()
        if name == "discrete_2":
            tensors["states"] = np.stack(states)
            tensors["images"] = np.stack([seen["image"] for seen in processor.seen]).reshape(
                len(ROWS), cameras, given.IMAGE, given.IMAGE, 3
            )
    with torch.device("meta"):
        full = {
            "action_head": shapes(L1RegressionActionHead(input_dim=4096, hidden_dim=4096, action_dim=7)),
            "proprio_projector": shapes(ProprioProjector(llm_dim=4096, proprio_dim=8)),
        }
    facts = {
        "layout": {
            "small": {"action_head": shapes(head), "proprio_projector": shapes(projector)},
            "full": full,
        },
    }
    return facts, tensors


class Processor:
    """Upstream's, with pixels left in float32; keeps what it saw."""

    def __init__(self) -> None:
        from prismatic.extern.hf.processing_prismatic import PrismaticImageProcessor, PrismaticProcessor
        from transformers import PreTrainedTokenizerFast

        side = given.IMAGE
        self._inner = PrismaticProcessor(
            PrismaticImageProcessor(
                use_fused_vision_backbone=True,
                image_resize_strategy="resize-naive",
                input_sizes=[(3, side, side)] * 2,
                interpolations=["bicubic"] * 2,
                means=given.MEANS,
                stds=given.STDS,
            ),
            PreTrainedTokenizerFast(tokenizer_object=given.word_tokenizer()),
        )
        self.seen: list[dict[str, Any]] = []

    def __call__(self, text: str, image: Any) -> Any:
        batch = self._inner(text, image)
        batch.pop("token_type_ids", None)
        self.seen.append({"text": text, "image": np.asarray(image), **batch})
        batch.to = lambda *args, **kwargs: batch
        return batch


def build_network(text: dict[str, Any], *, full: bool = False) -> Any:
    """Upstream's class: of the published size without weights, or a small one with those of ``golden_inputs``."""
    import torch
    from prismatic.extern.hf.configuration_prismatic import OpenVLAConfig
    from prismatic.extern.hf.modeling_prismatic import OpenVLAForActionPrediction
    from timm.models.vision_transformer import _create_vision_transformer

    published = {"vision_backbone_id": "dinosiglip-vit-so-224px", "llm_backbone_id": "llama2-7b-pure"}
    text = {"vocab_size": 32064, "pad_token_id": 32000, **text}
    if full:
        # timm reads rates from a tensor, which has to have values.
        with torch.device("meta"), mock.patch("torch.linspace", partial(torch.linspace, device="cpu")):
            return OpenVLAForActionPrediction(OpenVLAConfig(**published, text_config=text))
    # timm's own builder, with what its definitions of the published encoders set, in small.
    common = {"patch_size": 14, "embed_dim": 32, "depth": 3, "num_heads": 2, "mlp_ratio": 2.0}
    encoders = {
        "vit_tiny_test_dinov2": {"reg_tokens": 4, "no_embed_class": True, "init_values": 1e-5},
        "vit_tiny_test_siglip": {"class_token": False, "global_pool": "map"},
    }

    def create(name: str, act_layer: None, **kwargs: Any) -> Any:
        return _create_vision_transformer(name, **common, **encoders[name], **kwargs)

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = OpenVLAConfig(**published, text_config={**text, **sizes}, norm_stats=given.STATISTICS)
    config.timm_model_ids, config.image_sizes = list(encoders), [given.IMAGE] * 2
    config._attn_implementation = "sdpa"
    with mock.patch("timm.create_model", create):
        return filled(OpenVLAForActionPrediction(config))


def filled(module: Any, prefix: str = "") -> Any:
    import torch

    name_of = partial("{}.{}".format, prefix) if prefix else str
    weights = {
        name: torch.from_numpy(given.weight(name_of(name), tuple(tensor.shape)))
        for name, tensor in module.state_dict().items()
    }
    module.load_state_dict(weights)
    return module.eval()


def shapes(module: Any) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in module.state_dict().items()}


def _sampled(image: Any) -> Any:
    """Every seventh row and column of a large picture: all places relative to a filter of period 8 come up."""
    image = np.asarray(image)
    return image if image.shape[0] < 200 else image[::7, ::7]


if __name__ == "__main__":
    main()
