"""Saving: propose, plan, write, commit; in the foreground or in the background."""
