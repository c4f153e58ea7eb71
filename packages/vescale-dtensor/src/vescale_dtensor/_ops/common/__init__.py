"""What several families share. Families import this, and nearly nothing of each other."""
