"""A folder of the published layout that a CPU trains in seconds."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PI0Config, PI0ForConditionalGeneration

from embodied_rl.models.flow import lerobot_tiny
from embodied_rl.models.flow.lerobot_folder import LerobotFolder, write_folder
from embodied_rl.models.pi0 import files

_GEMMA = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}


def write(directory: Path, new_line_step: str) -> None:
    """Random weights from a fixed seed: every call writes the same."""
    tokenizer = lerobot_tiny.tokenizer("<bos>", "<eos>", "<pad>")
    config = PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": {
                "model_type": "gemma",
                "hidden_size": 64,
                "intermediate_size": 128,
                "vocab_size": len(tokenizer),
                **_GEMMA,
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "patch_size": 14,
                "image_size": 56,
                "vision_use_head": False,
            },
            "projection_dim": 64,
            "image_token_id": len(tokenizer),
        },
        dit_config={
            "model_type": "gemma",
            "hidden_size": 48,
            "intermediate_size": 96,
            "vocab_size": 1,
            "bos_token_id": None,
            "eos_token_id": None,
            **_GEMMA,
        },
        chunk_size=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lerobot_tiny.SEED)
        model = PI0ForConditionalGeneration(config)
    folder = LerobotFolder(
        path=str(directory),
        config=files.lerobot_config(
            config,
            state_dim=lerobot_tiny.STATE_DIM,
            action_dim=lerobot_tiny.ACTION_DIM,
            cameras=lerobot_tiny.CAMERAS,
        ),
        modes={"STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        statistics=lerobot_tiny.statistics(),
        tokenizer=tokenizer,
        tokenizer_name=files.TOKENIZER_NAME,
        max_prompt_length=48,
    )
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != files.EXPERT_WORDS}
    write_folder(folder, files.to_lerobot(weights), directory, new_line_step)
