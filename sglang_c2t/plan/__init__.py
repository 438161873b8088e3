"""The planner: how many layers to draft and how many rows to verify in each step. It uses numpy
alone and knows neither torch nor SGLang.
"""
