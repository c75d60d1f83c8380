"""Rules across fields of each task's configuration; those of all tasks are in ``validation.py``. Imports no torch."""
