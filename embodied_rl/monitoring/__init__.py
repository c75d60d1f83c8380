"""What a run tells about itself: metrics, progress, where the time goes."""
