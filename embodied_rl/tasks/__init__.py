"""What a run can do: one folder a task, and the parts of the loop that they share."""
