"""Measurements: start-up against the peers, steady state, and how overhead grows."""
