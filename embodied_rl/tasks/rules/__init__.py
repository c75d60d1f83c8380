"""Rules across fields that several tasks share. Imports no torch."""
