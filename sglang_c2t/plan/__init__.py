"""How much to draft and to verify, from what the server has learnt about its load."""
