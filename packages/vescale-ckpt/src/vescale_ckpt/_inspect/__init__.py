"""Looking at checkpoints: what they hold, whether it is intact, how two differ."""
