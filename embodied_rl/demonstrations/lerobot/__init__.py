"""LeRobot's dataset format v3.0, read and written without the library ``lerobot``. See docs/demonstrations.md.

https://huggingface.co/docs/lerobot/lerobot-dataset-v3
"""
