"""The target's side: packed verification of chains and trees."""
