"""From rollouts to training samples."""
