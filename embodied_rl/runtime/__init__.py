"""Workers, groups of them, and the ways to run them: in this process (serial) or in processes of their own."""
