"""How ranks agree, which of them share a machine, and what they share there."""
