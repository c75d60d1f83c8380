"""Rules across fields that several tasks share."""
