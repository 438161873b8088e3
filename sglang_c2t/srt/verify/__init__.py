"""Packed verification of chains and trees by the target."""
