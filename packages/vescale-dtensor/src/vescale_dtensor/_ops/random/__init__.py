"""Random numbers: those that one device would have drawn, through vescale_rng."""
