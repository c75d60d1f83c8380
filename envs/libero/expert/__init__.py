"""LIBERO's scripted expert: it plans from the simulator's privileged state. Imports no torch."""
