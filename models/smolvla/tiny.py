"""A folder of the published layout that a CPU trains in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from embodied_rl.models.flow import lerobot_tiny
from embodied_rl.models.flow.lerobot_folder import ARCHITECTURE, LerobotFolder, write_folder
from embodied_rl.models.smolvla import files
from embodied_rl.models.smolvla.network import SmolVlaNetwork


def write(directory: Path, new_line_step: str) -> None:
    """Random weights from a fixed seed: every call writes the same."""
    tokenizer = lerobot_tiny.tokenizer(None, "<end_of_utterance>", "<|im_end|>")
    config = _config(len(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lerobot_tiny.SEED)
        network = SmolVlaNetwork(files.read_sizes(config, str(directory)))
    folder = LerobotFolder(
        path=str(directory),
        config=config,
        modes={"STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        statistics=lerobot_tiny.statistics(),
        tokenizer=tokenizer,
        tokenizer_name=files.VLM_NAME,
        max_prompt_length=48,
    )
    weights = {f"model.{name}": tensor for name, tensor in network.state_dict().items()}
    write_folder(folder, files.with_head(weights), directory, new_line_step)


def _config(vocabulary: int) -> dict[str, Any]:
    return {
        "type": "smolvla",
        "n_obs_steps": 1,
        "input_features": lerobot_tiny.input_features(),
        "output_features": lerobot_tiny.output_features(),
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        "chunk_size": 16,
        "n_action_steps": 16,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "resize_imgs_with_padding": [64, 64],
        "empty_cameras": 0,
        "adapt_to_pi_aloha": False,
        "use_delta_joint_actions_aloha": False,
        "tokenizer_max_length": 48,
        "num_steps": 10,
        "vlm_model_name": files.VLM_NAME,
        "load_vlm_weights": False,
        "add_image_special_tokens": False,
        "attention_mode": "cross_attn",
        "prefix_length": 0,
        "pad_language_to": "max_length",
        "num_expert_layers": 0,
        "num_vlm_layers": 2,
        "self_attn_every_n_layers": 2,
        "expert_width_multiplier": 0.75,
        "min_period": 0.004,
        "max_period": 4.0,
        ARCHITECTURE: {
            "text": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "vocab_size": vocabulary,
            },
            "vision": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 64,
                "patch_size": 8,
            },
            "scale_factor": 2,
        },
    }
