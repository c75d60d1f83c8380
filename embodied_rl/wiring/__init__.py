"""Who talks to whom, and which loop drives them: one module a task."""
